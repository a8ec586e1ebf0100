"""Mistakes in PPO's critic."""

OBJECTIVE = "unit/algorithms/test_critic.py"
LEARNER = "unit/trainer/test_actor_critic.py"

CRITIC = [
    (
        "algorithms/critic.py",
        "after_T[end_N - 1] = values_T[end_N]",
        "after_T[end_N - 1] = values_T[end_N - 1]",
        f"{OBJECTIVE}::test_a_cut_response_goes_on_with_the_value_after_its_last_token",
    ),
    (
        "algorithms/critic.py",
        "clipped = (moved_M > clip).sum()",
        "clipped = (moved_M >= 0).sum()",
        f"{OBJECTIVE}::test_the_loss_is_half_the_larger_squared_error",
    ),
    (
        "algorithms/critic.py",
        "1 - error.variance() / variance",
        "1 - error.m2 / error.n / variance",
        f"{OBJECTIVE}::test_explained_variance_is_1_for_an_exact_critic_and_0_for_a_constant",
    ),
    (
        "algorithms/objective.py",
        "estimate(whiten=False, **lam)",
        "estimate(**lam)",
        f"{OBJECTIVE}::test_advantages_and_targets_are_those_of_a_loop",
    ),
    (
        "algorithms/objective.py",
        "rewards_T + gamma * value_after_cut(batch, values_T)",
        "rewards_T + value_after_cut(batch, values_T)",
        f"{OBJECTIVE}::test_a_cut_response_goes_on_with_the_value_after_its_last_token",
    ),
    (
        "trainer/actor_critic.py",
        "        self.actor.trainer.finish_batch()\n",
        "",
        f"{LEARNER}::test_only_the_critic_learns_while_it_warms_up",
    ),
    (
        "trainer/actor_critic.py",
        "return [self.actor.trainer, self.critic]",
        "return [self.actor.trainer]",
        f"{LEARNER}::test_offloading_both_changes_nothing",
    ),
    (
        "trainer/actor_critic.py",
        "return batch.mask | RewardHead().positions(batch)",
        "return batch.mask",
        f"{LEARNER}::test_values_after_the_last_token_are_read_where_a_cut_needs_them",
    ),
    (
        "trainer/trainer.py",
        "        if owns_groups:\n",
        "        if True:\n",
        f"{LEARNER}::test_the_groups_are_the_actors",
    ),
    (
        "checkpoint/state.py",
        'trained.scheduler.step = common[f"{prefix}schedule"]["step"]',
        'self.trained.scheduler.step = common["schedule"]["step"]',
        f"{LEARNER}::test_both_are_resumed_bit_for_bit",
    ),
    (
        "checkpoint/rank_state.py",
        "            box = replace(box, name=prefix + box.name)\n",
        "",
        f"{LEARNER}::test_both_are_resumed_bit_for_bit",
    ),
    (
        "run/models.py",
        "folder = model_folder(critic.model) if critic.model is not None else None",
        "folder = None",
        "unit/trainer/test_reward_model.py::test_a_critic_begins_as_the_reward_model_that_it_is_given",
    ),
    (
        "config/other_models.py",
        "if vocab != shape.vocab:",
        "if vocab == 0:",
        "unit/config/test_validate.py::test_a_critic_is_of_the_policys_vocabulary",
    ),
]
