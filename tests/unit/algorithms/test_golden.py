"""Every golden entry with a meaning of ours: value and gradient, fp32 and fp64, with NaN at masked positions.

An entry is either matched by a rule (golden_advantages.py, golden_losses.py) or left out by name and reason;
none is passed over in silence.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import golden_advantages  # noqa: F401 (fills RULES)
import golden_losses  # noqa: F401
import pytest
import torch
from golden_cases import CASES, FOLDER, RULES, Case, Outputs, load_case, tolerance
from safetensors.torch import load_file

from megarl.algorithms.kl import adapted
from megarl.algorithms.rows import clean
from megarl.algorithms.whitening import Stats, whiten_stats
from megarl.config.schema import KlTerm

# Reason -> (entries, cases), the first match counts.
LEFT_OUT = {
    "no such estimator of ours": (
        r"verl\.adv\.(grpo_passk|gdpo|(tir_)?optimal).*|trl\.adv\.(gdpo|rloo\.n1.*)",
        ".*",
    ),
    "no such loss of ours": (r"verl\.loss\.(dppo|dro).*|trl\.loss\.(vespo|beta_bc)\b.*", ".*"),
    "no such KL of ours": (r"verl\.kl\.(k1|abs)\+|nemo\.kl_sf\.k[12]", ".*"),
    "corrects by the policy being trained": (
        r"verl\.loss\.bypass\.(?!grpo\.(ppo_clip|reinforce)\.None\.None).*",
        ".*",
    ),
    "a factor that counts scores other than 0, wherever 0 lies": (
        r"verl\.adv\.gpg",
        "basic|multiturn|zero_variance|onpolicy",
    ),
    "rejects by other statistics": (r"verl\.rc\.(rs\.|is\.sequence\.0\.5).*", ".*"),
    "weights normalised by the batch, or by a geometric mean": (
        r"verl\.(rc\.is.*bn1|loss\.geo_mean\.grpo\.is)",
        ".*",
    ),
    "advantages that differ within a row, which gspo refuses": (r".*\.loss\.gspo\.rfpp.*", ".*"),
    "KL per token, not summed": (r"nemo\.adv\.reinforce_plus_plus.*|slime\.adv\..*", ".*"),
    "the peer clips after the baseline": (r"openrlhf\.adv\..*clip0.5.*", ".*"),
    "the peer walks through holes or padding": (
        r"(slime|roll)\.gae.*|roll\.reinforce.*|slime\.returns.*g0.99|openrlhf\.adv\..*g0.99.*",
        ".*",
    ),
    "the peer's sum is not masked, or not divided by the batch": (r"roll\.agg.*", ".*"),
    "the empty row counts": (
        r"verl\.(adv\.(grpo|rloo|gpg|opo|reinforce_plus_plus_baseline)|loss\.geo_mean).*"
        r"|(trl|nemo|roll|openrlhf)\.(adv|reward).*|trl\.loss\.((grpo|dr_grpo|sapo|gspo|luspo)\.grpo|rloo)",
        "masked_row",
    ),
    "the peer does not limit the log-ratio, or limits every value": (
        r"(trl|nemo|areal)\.loss.*|(openrlhf|nemo)\.(kl|adv).*|slime\.kl\.(unbiased_)?k3|verl\.loss\.(clip|kl)_cov.*",
        "extreme",
    ),
    "the peer's KL gradient ends where its value does": (
        r"nemo\.(kl_sf\.k3|loss\.kl.*)",
        "mixed_groups",
    ),
    "no variance but rounding: whether 1e-8 is added or a floor shows": (
        r"openrlhf\.adv\.reinforce_baseline.*nostd0",
        "singletons",
    ),
    "NaN for a group of one": (
        r"openrlhf\.adv\.(rloo|group_norm).*|roll\.reward_norm.*",
        "singletons",
    ),
}


def reason_left_out(entry_id: str, case: str) -> str | None:
    for reason, (entries_left_out, cases) in LEFT_OUT.items():
        if re.fullmatch(entries_left_out, entry_id) and re.fullmatch(cases, case):
            return reason
    return None


def differences(case: Case, entry_id: str, ours: Outputs) -> list[str]:
    """One line for each output that is not the peer's, at trained positions; ours is 0 at the others."""
    wrong = []
    compared = 0
    close = tolerance(case, entry_id)
    for name, value in ours.items():
        expected = case.output(entry_id, name)
        if expected is None:
            continue
        compared += 1
        if value.ndim and expected.ndim == 2:
            if bool(value[~case.mask].ne(0).any()):
                wrong.append(f"{entry_id} {name}: not 0 at masked positions")
            value, expected = value[case.mask], expected[case.kept][case.mask]
        elif value.ndim:  # the peer gives one number a row
            rows_T = torch.arange(expected.numel()).repeat_interleave(case.cu_seqlens.diff())
            value, expected = value[case.mask], expected[rows_T][case.mask]
        try:
            torch.testing.assert_close(value.to(expected.dtype), expected, equal_nan=False, **close)
        except AssertionError as error:
            wrong.append(f"{entry_id} {name}: {' '.join(str(error).split())[:200]}")
    if not compared:
        wrong.append(f"{entry_id}: no output compared")
    return wrong


def entries(name: str, dtype: str) -> Iterator[tuple[str, str | None]]:
    """(entry, why it is left out or None) of a case; entries on which the peer itself fails are not counted, nor
    those that only place a reward, which is collate's work."""
    for entry in load_case(name, dtype).entries:
        if dtype not in (entry.get("raises") or {}) and "compute_reward" not in entry["id"]:
            yield entry["id"], reason_left_out(entry["id"], name)


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("name", CASES)
def test_entries(name: str, dtype: str):
    case = load_case(name, dtype)
    wrong = []
    for entry_id, left_out in entries(name, dtype):
        if left_out:
            continue
        found = [
            (match, function)
            for pattern, function in RULES
            if (match := pattern.fullmatch(entry_id))
        ]
        if len(found) != 1:
            wrong.append(f"{entry_id}: matched by {len(found)} rules, and not left out")
            continue
        match, function = found[0]
        wrong += differences(case, entry_id, function(case, **match.groupdict()))
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)


def test_how_many_are_compared(capsys: pytest.CaptureFixture[str]):
    listed = [
        (entry_id, why)
        for name in CASES
        for dtype in ("f32", "f64")
        for entry_id, why in entries(name, dtype)
    ]
    reasons = Counter(why for _, why in listed if why)
    num_compared = len(listed) - reasons.total()
    with capsys.disabled():
        print(f"\ngolden entries: {num_compared} of {len(listed)} compared; left out:")
        for reason, count in reasons.most_common():
            print(f"  {count:4} {reason}")
    assert num_compared >= 0.7 * len(listed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [0, 100])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_whitening_of_shards(num_ranks: int, offset: int, dtype: torch.dtype):
    tensors = load_file(FOLDER / "misc.safetensors")
    name = f"{num_ranks}.{offset}.0"
    shards = [
        (tensors[f"in/w{name}.x{rank}"].to(dtype), tensors[f"in/w{name}.m{rank}"].bool())
        for rank in range(num_ranks)
    ]
    stats = Stats(0, 0.0, 0.0)
    for x_T, mask_T in shards:
        stats = stats.merge(whiten_stats(torch.where(mask_T, x_T, float("nan")), mask_T))
    scale = (stats.variance() + 1e-8) ** -0.5
    ours_T = torch.cat([clean((x_T - stats.mean) * scale, mask_T) for x_T, mask_T in shards])
    mask_T = torch.cat([mask_T for _, mask_T in shards])
    which = "f32" if dtype == torch.float32 else "f64"
    peer_T = tensors[f"out/verl.full_whiten.{name}@{which}/y"]
    close = {"rtol": 1e-4, "atol": 1e-4} if which == "f32" else {"rtol": 1e-7, "atol": 1e-6}
    torch.testing.assert_close(ours_T[mask_T], peer_T[mask_T], **close)
    assert not ours_T[~mask_T].any()


def test_adaptive_kl():
    tensors = load_file(FOLDER / "misc.safetensors")
    term = KlTerm(target=0.05, horizon=10000)
    rows = {"mask": torch.ones(256, dtype=torch.bool), "cu_seqlens": torch.arange(257)}
    batch: Any = SimpleNamespace(**rows)  # as many rows as tokens
    coef, ours = 0.2, []
    for kl in tensors["in/kl_seq"].tolist():
        coef = adapted(coef, kl, term, batch)
        ours.append(coef)
    expected = tensors["out/verl.adaptive_kl@f64/value"]
    torch.testing.assert_close(
        torch.tensor(ours, dtype=torch.float64), expected, rtol=1e-12, atol=0
    )
    assert adapted(coef, float("nan"), term, batch) == coef
