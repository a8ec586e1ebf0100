"""Mistakes in what is said of settings that a stage does not read, and of the models beside the policy."""

VALIDATE = "unit/config/test_validate.py"

STAGES = [
    (
        "config/validate.py",
        "if config.stage not in stages and",
        "if config.stage in stages and",
        f"{VALIDATE}::test_warnings_name_the_values",
    ),
    (
        "config/validate.py",
        "or has_steps or compares)",
        "or has_steps)",
        f"{VALIDATE}::test_refusals",
    ),
    (
        "config/model_checks.py",
        "if model and isinstance(path",
        "if False and isinstance(path",
        f"{VALIDATE}::test_refusals",
    ),
]
