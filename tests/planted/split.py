"""Mistakes in the split topology."""

GROUP = "dist/test_transports.py::test_processes_of_different_worlds_share_a_group_leave_it_and_join_again"
CHILDREN = "unit/platform/test_children.py::test_a_lost_child_is_noticed_and_its_family_ended"
BATCH = "unit/rollout/test_exchange.py::test_a_batch_is_flat_bytes_and_comes_back_as_it_was"
WORLD = "unit/config/test_validate.py::test_the_split_topology_counts_trainers_and_engines_apart"

SPLIT = [
    (  # the rank in the default group, which is 0 everywhere
        "weights/transports/collective.py",
        "(group.process_group.rank(), group.process_group.size())",
        "(dist.get_rank(), group.process_group.size())",
        GROUP,
    ),
    (
        "weights/transports/collective.py",
        "dist.all_reduce(total, group=self._group)",
        "dist.all_reduce(total)",
        GROUP,
    ),
    (
        "weights/transports/collective.py",
        'store.compare_set(f"{number}/verdict", "", absent)',
        'store.compare_set(f"{number + 1}/verdict", "", absent)',
        GROUP,
    ),
    ("platform/children.py", "found += [child, *descendants(child)]", "found += [child]", CHILDREN),
    ("platform/children.py", "Path(name).unlink()", "pass", CHILDREN),
    (
        "rollout/exchange.py",
        "copy = torch.from_numpy(data[offset:end].copy())",
        "copy = torch.from_numpy(data[offset:end])",
        BATCH,
    ),
    (
        "rollout/exchange.py",
        "values[field], offset = copy.view(dtype).reshape(shape), end",
        "values[field], offset = copy.view(dtype), end",
        BATCH,
    ),
    ("config/validate.py", "1 if is_split else config.rollout.tensor)", "config.rollout.tensor)", WORLD),
]
