"""The process environment, read once into a frozen `Env`; the only module that uses `os.environ`.

Does not import torch.

torchrun sets RANK, WORLD_SIZE and so on. megarl adds MEGARL_JOB_ID, a part of the names of a job's
shared resources on a host, and MEGARL_LAUNCHED, the process id of megarl's own launcher.
"""

import json
import logging
import os
import re
import sys
import traceback
from base64 import b64encode
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from pathlib import Path
from typing import Any
from unicodedata import category
from urllib.parse import quote, quote_plus, unquote

# For ranks on one node: gloo, NCCL and vLLM listen on the loopback interface, which other hosts
# cannot reach.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}
# One file per GPU. Sandboxes do not always mount /proc/driver.
GPU_FILES = (("/proc/driver/nvidia/gpus", "*"), ("/dev", "nvidia[0-9]*"))

RESUME_CHANGED = "MEGARL_RESUME_CHANGED"  # if set, a run may resume with changed data
# matches names of variables and fields with secrets
SECRET = re.compile(
    r"TOKEN|KEY|SECRET|PASS|_PWD\b|AUTH|CREDENTIALS?|DSN|COOKIE|BEARER|JWT|WEBHOOK|PRIVATE|ENCRYPT"
    r"|CONNECTION_STRING|SIGNATURE|(?<![A-Z])(?:PAT|SK|SAS|SIG)(?![A-Z])",
    re.IGNORECASE,
)
SECRET_NAMES = set[str]()  # other variables with secrets
SECRET_CHARS = 8  # shorter values may be ordinary words, and are not redacted
PASSWORD = re.compile(r"(?<=://)[^/\s:]*:([^/\s]+|[^\s@]+)@")  # group 1: the password in a URL
# Matches secrets anywhere in a text. Texts may be hostile, so all backtracking is limited.
FORMS = re.compile(
    # user:password@ in a URL
    r"(?<=://)(?:[^/\s'\"]*|[^/\s'\":]{0,99}:(?!\d+/)[^\s'\"@]{0,400})(?=@)"
    # name=value, name: value, {"name": "value"}; a key has a longer name
    rf"|(?P<start>(?:(?!(?-i:key|\bKey))(?:{SECRET.pattern})(?:WORD|WD|PHRASE|CODE|ORIZATION)?|PWD"
    r"|(?<=[?&])key|(?:api|access|account|secret|private|shared|signing|master)[_-]?key)"
    r"[\\'\"\]]{0,3}\s{0,3}(?:=>|[:=])\s{0,3}+(?:\\?['\"])?+"
    r"(?:(?:bearer|basic|token|digest|negotiate)\s{1,3})?+|\bbearer\s{1,3})"
    r"(?!\*{3}|[<\[({]|(?:true|false|none|null)(?![\w-]))"
    r"(?:(?<=\")[^\"\n\\]{4,}|(?<=')[^'\n\\]{4,}|[^\s'\"&,;#]{4,})(?:; [\w.-]+=[^\s;'\"]*)*"
    # known prefixes of tokens, and private keys
    r"|(?-i:\b(?:(?:hf|npm|gh[oprsu])_(?=[A-Za-z0-9]{10})|github_pat_|glpat-|xox[abeprs]-|eyJ|AIza"
    r"|sk-|[rs]k_live_|A[KS]IA|pypi-Ag|SG\.|ya29\.|nvapi-)[\w-]{10,}(?:\.[\w-]+)*)"
    r"|-----BEGIN[^-\n]{0,40}KEY[^-\n]{0,9}-----(?:[^-]|-(?!----))*(?:-----END[^-\n]*-----)?",
    re.IGNORECASE,
)
# packages that only some settings or installations need
BASE = "pip install megarl[cpu] or megarl[gpu]"
OPTIONAL = {  # module -> project, and the command that installs it
    "torch": f"PyTorch: {BASE}",
    "megatron.core": f"Megatron-Core: {BASE}",
    "vllm": f"vLLM: {BASE}",
    "transformer_engine": "Transformer Engine: pip install megarl[gpu]",
    "ray": "Ray: pip install megarl[ray]",
    "datasets": "datasets: pip install megarl[hf]",
    "tensorboard.summary": "TensorBoard: pip install megarl[tensorboard]",
    "wandb.sdk": "wandb: pip install megarl[wandb]",
    "uvicorn": "uvicorn: pip install megarl[serve]",
    "starlette": "Starlette: pip install megarl[serve]",
    "sentencepiece": "SentencePiece: pip install sentencepiece",
    "google.protobuf": "protobuf: pip install protobuf",
    "tiktoken": "tiktoken: pip install tiktoken",
}
HIDDEN = "Cc Cf Cn Co Cs Zl Zp"  # Unicode categories of characters to escape
# characters that look blank, but count as letters or marks
FILLERS = "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0"
MAX_CHARS = 8_000  # length limit of a text in a log
READ_CHARS = 3 * MAX_CHARS  # characters processed at its beginning and at its end


@dataclass(frozen=True)
class Env:
    """The rank and the job of a process; without a launcher, a job with a single rank."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0  # 0: not set
    has_launcher: bool = False  # a launcher set the values above
    launched: bool = False  # the launcher is megarl's own
    launcher_pid: int = 0  # the same on every rank of a host; its death ends the job
    job_id: str = ""  # the same on every rank of a host, unique to the job
    store_fd: int = -1  # memory shared with megarl's launcher (megarl.processes.heartbeat)
    slots_fd: int = -1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @classmethod
    def read(cls) -> "Env":
        """Reads the environment. Raises ValueError if a launcher's variable is not an integer."""
        source = os.environ
        job_id = source.get("MEGARL_JOB_ID", "")
        if "RANK" not in source or "WORLD_SIZE" not in source:
            pid = os.getpid()
            return cls(job_id=job_id or f"p{pid}", launcher_pid=pid)

        def number(name: str, default: int = 0) -> int:
            text = source.get(name, str(default))
            try:
                return int(text)
            except ValueError:
                raise ValueError(
                    f"environment variable {name}={text!r} is not an integer; use torchrun"
                ) from None

        world_size = number("WORLD_SIZE")
        port = number("MASTER_PORT")
        # torchrun's run id, or else the port, distinguishes jobs on a host
        job_id = (
            job_id or source.get("TORCHELASTIC_RUN_ID", "none").replace("none", "") or f"p{port}"
        )
        return cls(
            rank=number("RANK"),
            world_size=world_size,
            local_rank=number("LOCAL_RANK"),
            local_world_size=number("LOCAL_WORLD_SIZE", world_size),
            master_addr=source.get("MASTER_ADDR", "127.0.0.1"),
            master_port=port,
            has_launcher=True,
            launched="MEGARL_LAUNCHED" in source,
            launcher_pid=number("MEGARL_LAUNCHED", os.getppid()),
            job_id=job_id,
            store_fd=number("MEGARL_STORE_FD", -1),
            slots_fd=number("MEGARL_SLOTS_FD", -1),
        )


def get_env(name: str, default: str | None = None) -> str | None:
    """Returns a variable of another library; for rank and job use `Env`."""
    return os.environ.get(name, default)


def set_env(**variables: str | int | None) -> None:
    """Sets variables that other libraries read when they are imported; None removes a variable."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = str(value)


def child_env(**variables: str | int) -> dict[str, str]:
    """Returns this process's environment, updated by `variables`, for a child process."""
    return {**os.environ, **{name: str(value) for name, value in variables.items()}}


def redact(text: str) -> str:
    """Removes secrets from a text: replaces the values of secret variables by the variables' names,
    and text in the form of a secret by ***.
    """
    secrets = {}
    for name, value in os.environ.items():
        words = PASSWORD.findall(value)
        if SECRET.search(name) or name in SECRET_NAMES:
            words += [value, *(word for word in value.split() if "-----" not in word)]
        for word in words:
            if len(word) >= SECRET_CHARS:
                secrets |= dict.fromkeys(_encodings(word), name)
    for word in sorted(secrets, key=len, reverse=True):
        text = text.replace(word, f"${secrets[word]}")
    return FORMS.sub(r"\g<start>***", text)


def _encodings(secret: str) -> list[str]:
    """Returns the forms in which a text may contain a secret: plain, escaped, in a URL, base64."""
    quoted = [repr(secret)[1:-1], json.dumps(secret)[1:-1]]
    in_url = [quote(secret, ""), quote(secret), quote_plus(secret), unquote(secret)]
    return [secret, *quoted, *in_url, b64encode(os.fsencode(secret)).decode().rstrip("=")]


def log_text(text: str) -> str:
    """Returns a text of a model, server or user in a form that is safe to print.

    Secrets are redacted, the middle of a long text is left out, control characters are escaped, and
    lines after the first are indented.
    """
    head = _log_part(text[:READ_CHARS])
    tail = head
    if len(text) > READ_CHARS:  # drops the ends at the cuts, which may have part of a secret
        head = head[:-MAX_CHARS]
        tail = _log_part(text[-READ_CHARS:])[MAX_CHARS:]
    elif len(head) <= MAX_CHARS:
        return head
    half = MAX_CHARS // 2 - 20
    return f"{head[:half]} [... {len(text):,} characters] {tail[-half:]}"


def _log_part(text: str) -> str:
    return re.sub(r"\n(?!  )", "\n  ", escape_hidden(redact(text)))


def escape_hidden(text: str) -> str:
    """Escapes characters that move a terminal's cursor or hide or reverse text, and surrogates."""
    return "".join(
        ascii(char)[1:-1]
        if char not in "\n\t" and (category(char) in HIDDEN or char in FILLERS)
        else char
        for char in text
    )


class _LogRecord(logging.LogRecord):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.exc_info:
            self.exc_text = log_text("".join(traceback.format_exception(*self.exc_info)))

    def getMessage(self) -> str:
        return log_text(super().getMessage())


def clean_logs() -> None:
    """Makes every logger of this process pass its messages through `log_text`."""
    logging.setLogRecordFactory(_LogRecord)


def is_interactive() -> bool:
    """Returns True if stdout is a terminal that can redraw a line, not a pipe or a CI log."""
    return (
        sys.stdout.isatty()
        and os.environ.get("TERM", "") not in ("", "dumb")
        and "CI" not in os.environ
    )


def count_gpus() -> int:
    """Returns the number of GPUs visible to this process, without importing torch; 0 for a CPU
    build of torch.
    """
    try:
        if version("torch").endswith("+cpu"):
            return 0
    except PackageNotFoundError:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return sum(name.strip() not in ("", "-1") for name in visible.split(","))
    return next(
        filter(None, (len(list(Path(folder).glob(pattern))) for folder, pattern in GPU_FILES)), 0
    )


def compute_capability() -> tuple[int, int]:
    """Returns that of the node's first GPU, without creating a CUDA context; (0, 0) if NVML or
    nvidia-ml-py is missing.
    """
    major, minor = _of_first_gpu("nvmlDeviceGetCudaComputeCapability", (0, 0))
    return (major, minor)


def gpu_model() -> str:
    """Returns the name of the node's first GPU; "" if there is none, or NVML or nvidia-ml-py is
    missing.
    """
    return _of_first_gpu("nvmlDeviceGetName", "")


def _of_first_gpu(function: str, default: Any) -> Any:
    """Returns what a function of NVML returns for the node's first GPU."""
    try:
        import pynvml
    except ImportError:
        return default
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        return getattr(pynvml, function)(pynvml.nvmlDeviceGetHandleByIndex(0))
    return default


def has_bf16_products(cpuinfo: str = "/proc/cpuinfo") -> bool:
    """Returns True if the CPU has instructions for bf16 products, or if that is unknown."""
    with suppress(OSError):
        if flags := re.search(
            r"^(?:flags|Features)\s*:(.*)$", Path(cpuinfo).read_text(), re.MULTILINE
        ):
            return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags[1].split())
    return True


def require(setting: str, *modules: str) -> None:
    """Raises ValueError, with the command that installs it, if a module of OPTIONAL is missing."""
    for module in modules:
        if not is_installed(module):
            raise ValueError(f"{setting} needs {OPTIONAL[module]}")


def is_installed(module: str) -> bool:
    """Returns True if `module` (dotted) can be imported, without importing it or its parents."""
    path = None
    for name in accumulate(module.split("."), "{}.{}".format):
        spec = _find(name, path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return True


def _find(name: str, path: Any) -> ModuleSpec | None:
    if sys.modules.get(name, name) is None:  # a None entry makes `import` fail
        return None
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, path)
        except ImportError:
            return None
        except Exception:  # noqa: BLE001 (a broken finder is skipped)
            continue
        if spec:
            return spec
    return None
