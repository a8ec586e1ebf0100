"""Mistakes in what is said of settings that a stage does not read, and of the models beside the policy."""

VALIDATE = "unit/config/test_validate.py"

STAGES = [
    (
        "config/validate.py",
        "sections.difference(",
        "sections.intersection(",
        f"{VALIDATE}::test_warnings_name_the_values",
    ),
    (
        "config/algorithm.py",
        "        or config.stage_spec.compares  # whose own check explains it\n",
        "",
        f"{VALIDATE}::test_refusals",
    ),
    (
        "config/iterative.py",
        "if isinstance(path, str):",
        "if False:",
        f"{VALIDATE}::test_refusals",
    ),
]
