"""Mistakes in iterative GRPO and in reward models as rewards."""

REPLAY = "unit/data/test_replay.py"
MODEL = "unit/rewards/test_model_reward.py"
STAGE = "unit/stages/test_iterative_grpo.py"
STATE = "unit/checkpoint/test_state.py"
LEARNER = "unit/trainer/test_learner.py"
SCORER = "unit/rewards/test_scorer.py"

ITERATIVE = [
    (
        "data/preferences.py",
        "math.ceil(share * len(fresh) / (1 - share))",
        "math.ceil(share * len(fresh))",
        f"{REPLAY}::test_the_share_of_a_batch_is_exact",
    ),
    (
        "data/preferences.py",
        "Fraction(str(self.share))",
        "self.share",
        f"{REPLAY}::test_the_share_of_a_batch_is_exact",
    ),
    (
        "data/preferences.py",
        ".sample(self.rankings, count)",
        ".choices(self.rankings, k=count)",
        f"{REPLAY}::test_the_share_of_a_batch_is_exact",
    ),
    (
        "data/preferences.py",
        "[-self.capacity :]",
        "[: self.capacity]",
        f"{REPLAY}::test_the_history_begins_empty_and_keeps_the_newest",
    ),
    (
        "stages/iterative_grpo.py",
        "if rl.start == first:",
        "if True:",
        f"{STAGE}::test_an_iteration_begins_at_its_first_step_only",
    ),
    (
        "stages/iterative_grpo.py",
        "    rl.checkpoint.hold()  # until",
        "    # until",
        f"{STAGE}::test_an_iteration_begins_at_its_first_step_only",
    ),
    (
        "checkpoint/state.py",
        "            self.save()\n        self._saved = self._now.step",
        "            self.save()",
        f"{STATE}::test_an_iteration_that_is_refused_leaves_the_boundary_before_it",
    ),
    (
        "checkpoint/state.py",
        "rank_state.load(_chunks(self.trained), source, prefix=REFERENCE)",
        "pass",
        f"{STATE}::test_what_a_stage_has_beside_the_policy_comes_back",
    ),
    (
        "trainer/learner.py",
        "            self.reference.is_policy = False",
        "            pass",
        f"{LEARNER}::test_a_reference_that_has_become_the_policy_has_no_divergence",
    ),
    (
        "rewards/model.py",
        "mask_T[[*chain.from_iterable(positions)]] = True",
        "mask_T[[p - 1 for p in chain.from_iterable(positions)]] = True",
        f"{MODEL}::test_a_process_model_rewards_the_tokens_that_end_steps",
    ),
    (
        "rewards/scorer.py",
        "has_outcome=sample.has_outcome or is_outcome,",
        "has_outcome=True,",
        f"{MODEL}::test_a_score_is_added_to_the_outcome",
    ),
    (
        "rewards/scorer.py",
        "if samples and all(score.cause in UNREACHABLE",
        "if samples and any(score.cause in UNREACHABLE",
        f"{SCORER}::test_a_server_that_is_gone_stops_the_run_if_no_sample_reaches_it",
    ),
]
