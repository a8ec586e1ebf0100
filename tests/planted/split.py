"""Mistakes in the split topology."""

GROUP = "dist/test_transports.py::test_processes_of_different_worlds_share_a_group_leave_it_and_join_again"
CHILDREN = "unit/processes/test_children.py::test_a_lost_child_is_noticed_and_its_family_ended"
WORLD = "unit/config/test_validate.py::test_the_split_topology_counts_trainers_and_engines_apart"

FOLDER = "unit/split/test_ray_cluster.py::test_folders_of_jobs_that_were_killed_go_and_those_of_others_stay"
ENGINE = "unit/rollout/vllm/test_async_engine.py"
CLUSTER = "unit/split/test_ray_cluster.py"
ENGINES = "unit/split/test_engines.py"

SPLIT = [
    (
        "rollout/vllm/async_engine.py",
        'mode="keep", clear_cache=True',
        'mode="abort", clear_cache=True',
        f"{ENGINE}::test_no_prompt_before_a_verified_sync",
    ),
    (
        "rollout/vllm/async_engine.py",
        "        if not self.is_ready:\n",
        "        if False:\n",
        f"{ENGINE}::test_no_prompt_before_a_verified_sync",
    ),
    (
        "rollout/vllm/async_engine.py",
        "        self._finished.clear()\n",
        "",
        f"{ENGINE}::test_dropped_requests_do_not_come_back",
    ),
    (
        "rollout/vllm/async_engine.py",
        "        self.children.lost.set()\n",
        "",
        f"{ENGINE}::test_a_lost_process_ends_what_waits_for_it",
    ),
    (
        "split/engines.py",
        "        self.unassigned += self.replicas[number].requests.values()\n",
        "",
        f"{ENGINES}::test_requests_of_a_lost_engine_go_to_the_other_which_alone_is_ready",
    ),
    (
        "split/engines.py",
        "if self.restarts > limit:",
        "if False:",
        f"{ENGINES}::test_restarts_are_bounded",
    ),
    (
        "split/engines.py",
        '            rank = self.place.watch.gone("rank")\n',
        '            rank = ""\n',
        f"{ENGINES}::test_a_rank_that_is_gone_ends_a_rollout",
    ),
    (
        "split/stopped_processes.py",
        "(name, node, pid) in self._gone",
        "name in {gone for gone, *_ in self._gone}",
        "unit/split/test_stopped_processes.py::test_who_is_gone_is_known_by_its_place",
    ),
    (
        "split/stopped_processes.py",
        "[ray.get(reply)] * calls[reply]",
        "[ray.get(reply)]",
        "unit/split/test_stopped_processes.py::test_gpus_of_all_nodes_are_gathered",
    ),
    (
        "split/stopped_processes.py",
        "self._first.setdefault(node, name) == name",
        "node not in self._first and self._first.setdefault(node, name)",
        "unit/split/test_stopped_processes.py::test_one_process_records_the_timeline_of_a_node",
    ),
    (
        "split/engines.py",
        "replica.is_joined = replica.is_ready = False",
        "replica.is_joined = False",
        f"{ENGINES}::test_after_the_ranks_are_lost_no_sample_of_before_is_taken",
    ),
    (
        "split/controller.py",
        'self._end_barrier(f"engine {replica.number}")',
        "pass",
        f"{ENGINES}::test_an_engine_lost_in_a_sync_is_replaced_and_the_sync_made_again",
    ),
    (
        "split/controller.py",
        "in (self.barriers, self.barriers + 1):",
        "in (self.barriers,):",
        f"{ENGINES}::test_an_engine_lost_in_a_sync_is_replaced_and_the_sync_made_again",
    ),
    (
        "split/ray_actors.py",
        "raise gone or RankLost(first)",
        "raise RankLost(first)",
        f"{ENGINES}::test_a_rank_that_is_gone_is_the_cause_of_what_its_peers_report",
    ),
    (
        "split/ray_actors.py",
        "                        deadline = 0.0\n",
        "                        pass\n",
        f"{ENGINES}::test_a_rank_that_is_gone_is_the_cause_of_what_its_peers_report",
    ),
    (
        "split/ray_cluster.py",
        "deadline or time.monotonic() + ROOM_S",
        "deadline or time.monotonic()",
        f"{CLUSTER}::test_a_node_is_waited_for_and_then_given_up",
    ),
    (
        "split/entry.py",
        "first = first or error",
        "first = error",
        f"{CLUSTER}::test_the_first_layout_with_room_goes_on",
    ),
    (
        "config/launch.py",
        '{"launch": launch, "parallel": layout.parallel}',
        '{"launch": launch}',
        f"{CLUSTER}::test_a_fallback_replaces_the_whole_layout",
    ),
    (
        "config/validate.py",
        "enumerate(fallbacks(config))",
        "enumerate(fallbacks(config)[:1])",
        "unit/config/test_validate.py::test_refusals",
    ),
    (
        "commands/start.py",
        "if code == DONE:",
        "if True:",
        "unit/config/test_run_dir.py::test_a_full_disk_is_said_once",
    ),
    (
        "split/engines.py",
        "            if any(replica.is_ready for replica in self.replicas):\n                self._assign()\n",
        "            self._assign()\n",
        f"{ENGINES}::test_the_only_engine_lost_while_the_trainer_works_gets_weights_when_it_is_asked",
    ),
    (
        "split/engines.py",
        "self.place.cluster.expect_nodes()  # what",
        "pass  # what",
        f"{ENGINES}::test_when_a_node_has_taken_many_along_the_node_is_the_cause",
    ),
    (
        "split/controller.py",
        "while waiting and not lost and time.monotonic() < deadline:",
        "while False:",
        f"{ENGINES}::test_a_failure_of_the_ranks_may_be_an_engines",
    ),
    (
        "rollout/vllm/async_engine.py",
        "            raise RuntimeError(self._error)\n        value =",
        "            pass\n        value =",
        f"{ENGINE}::test_a_lost_process_ends_what_waits_for_it",
    ),
    (  # gloo ends a group's connections with its last reference
        "weights/sync/transports/collective.py",
        "        # gloo keeps connections until the last reference\n"
        "        process_group = self._joined\n"
        "        self._joined = None\n",
        "        process_group = self._joined  # gloo keeps connections until the last reference\n",
        GROUP,
    ),
    (
        "weights/sync/transports/collective.py",
        "        self.leave()  # so that",
        "        # so that",
        GROUP,
    ),
    (
        "weights/sync/transports/collective.py",
        "    barriers.meet(",
        "    next(barriers._numbers)  # (",
        GROUP,
    ),
    (  # the rank in the default group, which is 0 everywhere
        "weights/sync/transports/collective.py",
        "self.rank = barriers.rank",
        "self.rank = dist.get_rank()",
        GROUP,
    ),
    (
        "weights/sync/transports/collective.py",
        "dist.all_reduce(total, group=self._group)",
        "dist.all_reduce(total)",
        GROUP,
    ),
    (
        "weights/sync/transports/collective.py",
        'store.compare_set(f"{number}/verdict", "", absent)',
        'store.compare_set(f"{number + 1}/verdict", "", absent)',
        GROUP,
    ),
    (
        "processes/children.py",
        "this.children(recursive=True)",
        "this.children()",
        CHILDREN,
    ),
    ("processes/children.py", "Path(name).unlink()", "pass", CHILDREN),
    (
        "split/ray_cluster.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        FOLDER,
    ),
    ("split/ray_cluster.py", "> 10:", "> -1:", FOLDER),
    (
        "weights/sync/transports/values.py",
        "weights_only=True",
        "weights_only=False",
        "unit/weights/test_values.py::test_what_is_no_value_is_refused_without_running_it",
    ),
    (
        "config/launch.py",
        "1 if config.launch.is_split else config.rollout.ranks_per_replica",
        "config.rollout.ranks_per_replica",
        WORLD,
    ),
    (
        "rollout/vllm/async_engine.py",
        "list(chain.from_iterable(by_core))",
        "list(by_core[0])",
        f"{ENGINES}::test_replies_of_every_data_rank_are_read",
    ),
    (
        "split/engines.py",
        "        for actor in (replica.actor, *replica.others):\n",
        "        for actor in (replica.actor,):\n",
        f"{ENGINES}::test_all_parts_of_an_engine_over_nodes_end_and_start_together",
    ),
    (
        "split/ray_actors.py",
        "                end.add_done_callback(lambda end: made.lose(end.result().message))\n",
        "                pass\n",
        f"{ENGINES}::test_an_engine_ends_with_its_part_on_another_node",
    ),
    (
        "weights/plan/senders.py",
        "        if placement.is_spread:\n",
        "        if False:\n",
        "unit/weights/test_plan.py::test_links_are_busy_with_data_ranks",
    ),
    (
        "weights/plan/senders.py",
        "unit = instances.rotation[chosen] + placement.groups[number].unit",
        "unit = instances.rotation[chosen] + number",
        "unit/weights/test_plan.py::test_links_are_busy_with_data_ranks",
    ),
]
