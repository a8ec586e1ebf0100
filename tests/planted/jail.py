"""Mistakes in the jail."""

SANDBOX = "unit/jail/test_sandbox.py"
ESCAPES = "unit/jail/test_escapes.py"
CALLS = "unit/jail/test_syscalls.py"

JAIL = [
    (
        "jail/fork_server.py",
        "env=ENVIRONMENT if self.is_clean else None,",
        "env={**os.environ, **ENVIRONMENT},",
        f"{SANDBOX}::test_the_environment_and_the_arguments_tell_nothing",
    ),
    (
        "jail/sandbox.py",
        'tempfile.TemporaryDirectory(prefix="megarl-code-", ignore_cleanup_errors=True)',
        'type("", (), {"__enter__": lambda _: tempfile.mkdtemp(), "__exit__": lambda *_: None})()',
        f"{SANDBOX}::test_no_folder_is_left",
    ),
    (
        "jail/sandbox.py",
        "if self.missing and self.limits.strict:",
        "if False:",
        f"{SANDBOX}::test_a_limit_that_fails_when_the_code_starts_leaves_the_sample_out",
    ),
    (
        "jail/sandbox.py",
        "if not was_started:",
        "if True:  # each",
        f"{SANDBOX}::test_a_forged_report_buys_no_time",
    ),
    (
        "jail/sandbox.py",
        ".st_nlink - 2 > MAX_THREADS",
        ".st_nlink < 0",
        f"{ESCAPES}::test_threads_are_counted_where_the_kernel_does_not",
    ),
    (
        "jail/sandbox.py",
        "is_listed or (stat.S_ISREG",
        "is_listed and (stat.S_ISREG",
        f"{ESCAPES}::test_nothing_escapes[Landlock alone]",
    ),
    (
        "jail/jailed.py",
        "if os.getppid() != parent:",
        "if False:",
        f"{SANDBOX}::test_a_parent_that_died_before_is_noticed",
    ),
    (
        "jail/jailed.py",
        "os.setresuid(REAL_USERS + os.getpid(), -1, -1)",
        "pass",
        f"{ESCAPES}::test_nothing_escapes[root]",
    ),
    (
        "jail/filesystem.py",
        'check(LIBC.umount2(b".", MNT_DETACH))  # the old',
        "LIBC.getpid()  # the old",
        f"{ESCAPES}::test_nothing_escapes[root]",
    ),
    (
        "jail/filesystem.py",
        "size={size_bytes},",
        "",
        f"{ESCAPES}::test_nothing_escapes[root]",
    ),
    (
        "jail/syscalls.py",
        "(ret, 0, 0, ENOSYS), (ret, 0, 0, EPERM)]",
        "(ret, 0, 0, ENOSYS), (ret, 0, 0, ALLOW)]",
        f"{CALLS}::test_every_number",
    ),
    (
        "jail/syscalls.py",
        "(at_least, 0, 1, X32), (ret, 0, 0, KILL)",
        "(at_least, 0, 1, X32), (ret, 0, 0, ENOSYS)",
        f"{CALLS}::test_every_number",
    ),
    (
        "jail/syscalls.py",
        "Condition(9, ALL_BITS, (0,), EPERM)",
        "Condition(8, ALL_BITS, (0,), EPERM)",
        f"{CALLS}::test_the_calls_that_depend_on_their_arguments",
    ),
    (
        "jail/syscalls.py",
        "Condition(2 * argument, O_TMPFILE, (0,), EPERM),",
        "",
        f"{ESCAPES}::test_nothing_escapes[root]",
    ),
    (
        "jail/jailed.py",
        "    spec.clear()  # the code could read it in the callers' frames\n",
        "",
        f"{ESCAPES}::test_nothing_escapes[root]",
    ),
    (
        "jail/fork_server.py",
        "signal.signal(number, signal.SIG_DFL)",
        "pass",
        f"{SANDBOX}::test_signals_that_the_parent_ignores_or_blocks",
    ),
    (
        "jail/sandbox.py",
        'if process.output != b"42\\n":',
        "if False:",
        f"{SANDBOX}::test_a_jail_that_never_answers_is_refused",
    ),
    (
        "cli.py",
        "signal.signal(signal.SIGCHLD, signal.SIG_DFL)",
        "pass",
        "unit/test_cli.py::test_an_ignored_sigchld_is_reset",
    ),
]
