"""Mistakes in versions, in the schedule that generates ahead, and in the ledger."""

LEDGER, STALENESS = "unit/data/test_ledger.py", "unit/rollout/test_staleness.py"
BALANCES = f"{LEDGER}::test_it_balances_wherever_a_run_is_killed"
CURSOR = f"{LEDGER}::test_the_cursor_is_that_of_what_was_trained"
NAMES = f"{LEDGER}::test_an_audit_names_the_prompts_that_do_not_balance"
BOUND = f"{STALENESS}::test_every_token_is_within_the_bound_and_every_prompt_is_accounted_for"
PARITY = "unit/parity/test_gate.py::test_tokens_of_older_weights_are_not_judged"

STALE = [
    ("rollout/schedule.py", "version + self.max_staleness + 1)", "version + self.max_staleness + 2)", BOUND),
    (
        "rollout/schedule.py",
        "oldest < version - self.max_staleness:",
        "False:",
        f"{STALENESS}::test_a_token_that_is_too_old_is_refused",
    ),
    ("rollout/schedule.py", "(step < self.last_step or step == version)", "True", BOUND),
    ("rollout/schedule.py", "number in used if number in flat]", "number in flat]", BOUND),
    (
        "rollout/schedule.py",
        "range(version, version + self.max_staleness + 1)",
        "range(version, version + 1)",
        f"{STALENESS}::test_what_staleness_gains",
    ),
    (
        "rollout/overlap.py",
        "prompt_id=-1 - r.prompt.prompt_id",
        "prompt_id=r.prompt.prompt_id",
        f"{STALENESS}::test_an_evaluation_while_others_are_on_their_way",
    ),
    ("rollout/overlap.py", "        self.drain()\n", "", BOUND),
    ("rollout/overlap.py", "        while self.missing:", "        if self.missing:", BOUND),
    ("data/collate.py", "torch.where(tokens.mask, versions_T, -1)", "versions_T", "unit/data/test_collate.py"),
    (
        "telemetry/metrics.py",
        "(version - sample.versions[sample.trainable])",
        "(sample.versions[sample.trainable] - version)",
        "unit/telemetry/test_telemetry.py",
    ),
    ("parity/gate.py", "replace(batch, mask=is_fresh_T)", "batch", PARITY),
    ("data/ledger.py", '*self._carried, self.stream.state()["position"]]', "*self._carried, 1 << 60]", CURSOR),
    ("data/ledger.py", "if prompt.prompt_id not in self._settled]", "]", BALANCES),
    ("data/ledger.py", "for number in sorted(self._carried) if number > behind]", "for number in sorted(self._carried)]", BALANCES),
    ("data/ledger.py", "behind = max([self._last, *self._open])", "behind = self._last", BALANCES),
    ("data/ledger.py", 'state |= {"position": first,', 'state |= {"position": position,', CURSOR),
    ("data/ledger.py", 'self._file.write("\\n")  #', "#", BALANCES),
    ("telemetry/audit.py", "        unsettled = saved - done - self.too_long\n", "        unsettled = ()\n", NAMES),
    ("telemetry/audit.py", "self._report(done - saved,", "self._report((),", NAMES),
    ("telemetry/audit.py", "self._report(range(self.head, start),", "self._report((),", NAMES),
    ("telemetry/audit.py", "if len(gaps) != too_long:", "if False:", NAMES),
    ("telemetry/audit.py", "self._report(again, \"were taken", "self._report((), \"were taken", NAMES),
]  # fmt: skip
