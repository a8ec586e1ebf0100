"""Mistakes in how many prompts are asked for, and in what becomes of those that are not needed."""

SCHEDULE, STREAM = "unit/rollout/test_schedule.py", "unit/data/test_tasks.py"
SAME = f"{SCHEDULE}::test_what_is_trained_on_does_not_depend_on_how_many_are_asked_for"
FEWER = f"{SCHEDULE}::test_after_the_first_step_most_steps_need_no_refill"
PUT_BACK = f"{STREAM}::test_prompts_that_are_put_back_come_again"

REFILLS = [
    (
        "rollout/schedule.py",
        "prompts.take(min(size, limit - len(batch.taken)))",
        "prompts.take(size)",
        f"{SCHEDULE}::test_refills_are_bounded",
    ),
    (
        "rollout/schedule.py",
        "limit = (1 + self.max_refills) * count",
        "limit = 2 * count",
        f"{SCHEDULE}::test_a_few_prompts_are_enough_at_the_end_of_the_budget",
    ),
    ("rollout/schedule.py", "(missing + math.sqrt(missing * (1 - share)))", "missing", FEWER),
    ("rollout/schedule.py", "/ 2 + number", "* 0", FEWER),
    ("rollout/schedule.py", "/ 2 + number", "/ 2 + len(taken)", FEWER),
    (
        "rollout/schedule.py",
        "self.kept[count:] = []",
        "self.kept[:-count] = []",
        SAME,
    ),
    (
        "rollout/schedule.py",
        "batch.carried = taken[taken.index(",
        "batch.carried = taken[:0][taken.index(",
        SAME,
    ),
    (
        "rollout/schedule.py",
        "taken.index(kept[count - 1].prompt)",
        "taken.index(kept[-1].prompt)",
        SAME,
    ),
    (
        "rollout/schedule.py",
        "share = min(max(kept, 1.0) / asked, 1.0)",
        "share = min(max(kept, 1.0) / asked, 0.9)",
        f"{SCHEDULE}::test_where_every_group_is_kept_no_more_than_the_batch_is_asked_for",
    ),
    ("data/prompts.py", "self.skipped -= self.position - first - len(prompts)", "pass", PUT_BACK),
    ("data/prompts.py", "self._drawn[self.position - 1]", "self._drawn[-1]", PUT_BACK),
]
