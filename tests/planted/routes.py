"""Mistakes in the routes that the trainer replays."""

REPLAY = "unit/trainer/test_router_replay.py"

ROUTES = [
    (
        "trainer/router_replay.py",
        "return scores.gather(1, chosen_NK), chosen_NK",
        "return values, chosen_NK",
        f"{REPLAY}::test_planted_routes_are_taken_in_forward_and_update",
    ),
    (
        "trainer/router_replay.py",
        "return scores.gather(1, chosen_NK), chosen_NK",
        "return scores.gather(1, chosen_NK).detach(), chosen_NK",
        f"{REPLAY}::test_the_routers_gradient_is_that_of_their_probabilities",
    ),
    (
        "trainer/router_replay.py",
        "number = self.calls[has_grad]",
        "number = 0",
        f"{REPLAY}::test_planted_routes_are_taken_in_forward_and_update",
    ),
    (
        "trainer/router_replay.py",
        "number = self.calls[has_grad]",
        "number = self.calls[False] % len(self.experts or [0])",
        f"{REPLAY}::test_recomputed_activations_take_the_same_routes",
    ),
    (
        "trainer/router_replay.py",
        "                router.router_replay = None\n",
        "                pass\n",
        f"{REPLAY}::test_planted_routes_are_taken_in_forward_and_update",
    ),
    (
        "trainer/router_replay.py",
        "        if wrong:\n",
        "        if False:\n",
        f"{REPLAY}::test_one_changed_route_is_noticed_and_nothing_is_left",
    ),
    (
        "trainer/router_replay.py",
        "counted_N = is_real_N & ~torch.isin(source_N, ends)",
        "counted_N = is_real_N",
        f"{REPLAY}::test_tokens_without_a_route_are_routed_by_the_trainer_and_counted",
    ),
    (
        "trainer/router_replay.py",
        "for layer in layers if has_experts[layer]]",
        "for layer in list(layers)[::-1] if has_experts[layer]]",
        f"{REPLAY}::test_planted_routes_are_taken_in_forward_and_update",
    ),
    (
        "trainer/learner.py",
        "                batch = replace(batch, choices=())  # the reference has its own\n",
        "",
        f"{REPLAY}::test_only_the_policy_replays",
    ),
    (
        "trainer/router_replay.py",
        "if not self.is_policy or not (record or batch.choices):",
        "if not (record or batch.choices):",
        f"{REPLAY}::test_only_the_policy_replays",
    ),
    (
        "parity/gate.py",
        "        if not self.follows_engine:",
        "        if False:",
        "unit/parity/test_gate.py::test_choices_are_followed_where_the_engine_made_them[False]",
    ),
    (
        "data/collate.py",
        "return tuple(value[row] for row in rows if value)",
        "return value",
        f"{REPLAY}::test_rows_keep_their_routes",
    ),
    (
        "types.py",
        "if num_experts <= 256 else",
        "if num_experts < 256 else",
        f"{REPLAY}::test_256_experts_fit_a_byte",
    ),
    (
        "rollout/exchange.py",
        "replace(s, choices=choices.get(s.key, s.choices))",
        "s",
        "unit/rollout/test_exchange.py::test_routes_stay_where_they_were_sampled",
    ),
    (
        "rollout/vllm/routes.py",
        "self._table.zero_()",
        "pass",
        "unit/rollout/vllm/test_routes.py::test_routes_go_with_the_cache",
    ),
    (
        "rollout/vllm/routes.py",
        "chosen[:length].transpose(0, 1)[:, :computed]",
        "chosen[:length].transpose(0, 1)[:, :computed].flip(1)",
        "unit/rollout/vllm/test_routes.py::test_routes_are_read_through_the_blocks_of_a_request",
    ),
]
