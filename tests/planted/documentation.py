"""Mistakes in what the documentation is generated from: texts, and the command that prints them."""

PAGES = "unit/docs/test_pages.py"

DOCUMENTED = [
    (
        "config/rollout.py",
        '    """Sampling temperature."""\n',
        "",
        f"{PAGES}::test_every_key_has_a_text",
    ),
    (
        "config/presets.py",
        "    # Williams 1992: the reward-to-go times the gradient of log pi, no baseline, no discount.\n",
        "",
        f"{PAGES}::test_every_preset_has_a_text",
    ),
    (
        "processes/exit_codes.py",
        '"""Interrupted with Ctrl-C."""\n',
        "",
        f"{PAGES}::test_every_exit_code_has_a_text",
    ),
    (
        "telemetry/metrics.yaml",
        "  grad_norm: Norm",
        "  gradient_norm: Norm",
        f"{PAGES}::test_every_metric_has_a_text",
    ),
    (
        "trainer/moe.py",
        'self._sums = {"moe/aux_loss": zero, "moe/z_loss": zero.clone()}',
        'self._sums = {"moe/aux_loss": zero, "moe/z": zero.clone()}',
        f"{PAGES}::test_every_metric_has_a_text",
    ),
    (
        "commands/explain.py",
        'name = re.sub(r"\\.\\d+\\b", "", args.key)',
        "name = args.key",
        f"{PAGES}::test_explain_prints_type_default_text_and_checks",
    ),
    (
        "config/reference.py",
        "values[preset] = value",
        "values[preset] = None",
        f"{PAGES}::test_explain_prints_type_default_text_and_checks",
    ),
]
