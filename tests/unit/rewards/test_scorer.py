"""Weighted sums of rewards, and functions that raise, hang or return nonsense: the sample is left out and counted."""

from __future__ import annotations

import json
import math
import threading
import time
from dataclasses import replace
from types import MappingProxyType

import pytest
import torch

from megarl.config.schema import Reward, Task
from megarl.data.tasks import load_task
from megarl.rewards.interface import BatchReward, Score, ScoreError
from megarl.rewards.scorer import Scorer, make_scorer
from megarl.rollout.schedule import Rollouts
from megarl.types import CheckFailed, Prompt, Sample
from tests.unit.rewards import user_functions

FUNCTIONS = "tests.unit.rewards.user_functions"


def sample(prompt_id: int = 0, index: int = 0, text: str = "17") -> Sample:
    tokens = torch.tensor([4, 5, 6, 8])
    trainable = torch.tensor([False, True, True, True])
    return Sample(
        prompt_id,
        index,
        tokens,
        trainable,
        torch.zeros(4),
        tokens.int(),
        "stop",
        text,
        extra={"kept": 1},
    )


PROMPT = Prompt(0, (4,), "what is 8 + 9?", "17", {"level": 3})


def scorer_of(function: str, *, timeout_s: float = 10.0, **reward) -> Scorer:
    return make_scorer([Reward(name=f"{FUNCTIONS}:{function}", **reward)], timeout_s=timeout_s)


def score_one(scorer: Scorer, text: str = "17") -> Sample:
    return scorer.start([PROMPT]).results([sample(text=text)])[0]


def test_weighted_sum_and_each_reward_by_name():
    even = "megarl.rewards.rules:even_fraction"
    scorer = make_scorer(
        [Reward(name="accuracy"), Reward(name="format", weight=0.5), Reward(name=even, weight=-3.0)]
    )
    done = score_one(scorer, "<think>8 + 9</think> 17")
    assert done.rewards == {"accuracy": 1.0, "format": 1.0, even: 2 / 3}
    assert done.reward == pytest.approx(1.0 + 0.5 - 2.0)


def test_text_is_decoded_from_the_trainable_tokens():
    scorer = make_scorer([Reward(name="accuracy")], decode=lambda tokens: "".join(map(str, tokens)))
    done = scorer.start([replace(PROMPT, answer="568")]).results([sample(text="stale")])[0]
    assert (done.text, done.reward) == ("568", 1.0)


def test_a_function_takes_what_it_names():
    assert score_one(scorer_of("names", options={"bonus": 2.0})).reward == 3.0


def test_a_function_may_take_everything():
    assert score_one(scorer_of("everything")).reward == len(PROMPT.text)


def test_the_place_of_the_answer_holds_for_every_judge(tmp_path):
    """For a reference, for reasoning-gym's own judge and for a user's function alike."""
    file = tmp_path / "calls"
    gym = load_task(Task(name="reasoning_gym:chain_sum")).problem(0)
    prompts = [PROMPT, Prompt(1, (4,), str(gym.question), gym.answer, gym.extra)]
    texts = [
        f"17 {gym.answer}",
        f"I say <answer>{prompts[0].answer}</answer>",
        f"So <answer>{gym.answer}</answer>",
    ]
    samples = [
        sample(prompt_id, index, text=text)
        for prompt_id, index, text in (
            (0, 0, texts[0]),
            (1, 0, texts[0]),
            (0, 1, texts[1]),
            (1, 1, texts[2]),
        )
    ]
    recorded = Reward(name=f"{FUNCTIONS}:record", options={"file": str(file)})
    scorer = make_scorer([Reward(name="accuracy"), recorded], answer="tag")
    done = scorer.start(prompts).results(samples)
    assert [s.rewards["accuracy"] for s in done] == [0.0, 0.0, 1.0, 1.0]
    assert [s.extra.get("counted") for s in done] == [["reward/accuracy/no_answer"]] * 2 + [
        None
    ] * 2
    seen = [json.loads(line)[1] for line in file.read_text().splitlines()]
    assert seen == [None, None, "17", gym.answer]
    assert all(s.reward is not None for s in done), (
        "no answer is the policy's fault: the sample is trained on"
    )


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        ("raises", "error"),
        ("leaves", "error"),
        ("dies", "error"),
        ("text", "error"),
        ("nothing", "error"),
        ("without_score", "error"),
        ("demanding", "error"),
        ("nan", "nan"),
        ("infinite", "nan"),
        ("nan_tensor", "nan"),
    ],
)
def test_a_hostile_function_loses_its_sample_only(function, cause):
    done = score_one(scorer_of(function))
    assert done.reward is None
    assert done.extra.pop("detail"), "why, for the message of a step without samples"
    assert done.extra == {"kept": 1, "dropped": f"reward/{FUNCTIONS}:{function}/{cause}"}


@pytest.mark.parametrize("function", ["hangs", "parses_for_ever"])
def test_a_function_that_hangs_is_stopped(function):
    start = time.monotonic()
    done = score_one(scorer_of(function, timeout_s=0.2))
    assert time.monotonic() - start < 60
    assert done.extra["dropped"].endswith("/timeout")


def test_maths_that_would_take_for_ever_is_worth_0():
    start = time.monotonic()
    done = (
        make_scorer([Reward(name="accuracy")], timeout_s=1.0)
        .start([replace(PROMPT, answer="6!")])
        .results([sample(text="$99999999!$")])[0]
    )
    assert time.monotonic() - start < 60
    assert (done.reward, done.extra["counted"]) == (0.0, ["reward/accuracy/timeout"])


def test_one_bad_sample_among_good_ones_and_the_limit_is_off_after():
    samples = [sample(index=i, text=str(i)) for i in range(3)]
    scorer = scorer_of("reciprocal", timeout_s=0.3)
    done = scorer.start([PROMPT]).results(samples)
    assert [s.reward for s in done] == [-1.0, None, 1.0]
    assert [s.index for s in done] == [0, 1, 2]
    time.sleep(0.5)  # a limit left on would end the process
    assert score_one(scorer, "2").reward == 1.0


def test_a_sum_that_overflows():
    scorer = scorer_of("large", weight=1e10)
    assert score_one(scorer).extra["dropped"] == "reward/total/nan"


def test_each_cause_is_logged_once(caplog):
    scorer = scorer_of("raises")
    for _ in range(3):
        score_one(scorer)
    assert len(caplog.records) == 1
    assert "KeyError: 'no such test'" in caplog.text


def test_limits_hold_on_another_thread_too():
    done = []
    for function in ("reference", "hangs"):
        scorer = scorer_of(function, timeout_s=0.3)
        thread = threading.Thread(target=lambda scorer=scorer: done.append(score_one(scorer)))
        thread.start()
        thread.join()
    assert done[0].reward == 17.0
    assert done[1].extra["dropped"].endswith("/timeout")


def test_functions_of_a_module_share_their_state_until_one_is_late():
    """Also with a scorer that is made later, as for an evaluation; never that of this process."""
    score_one(scorer_of("dies"))  # the process before
    rewards = [Reward(name=f"{FUNCTIONS}:{name}") for name in ("counts", "counts_too")]
    totals = [score_one(make_scorer(rewards)).reward for _ in range(2)]
    assert totals == [1 + 2, 3 + 4] and not user_functions.CALLS
    late = score_one(make_scorer(rewards[:1], timeout_s=0.2), "sleep")
    assert late.extra["dropped"] == f"reward/{FUNCTIONS}:counts/timeout"
    assert late.extra["detail"] == "took longer than 0.2 s"
    assert score_one(make_scorer(rewards)).reward == 1 + 2


@pytest.mark.long
def test_a_function_may_call_the_tasks_own_judge():
    problem = load_task(Task(name="reasoning_gym:chain_sum")).problem(0)
    prompt = Prompt(0, (4,), str(problem.question), problem.answer, problem.extra)
    scorer = scorer_of("half", timeout_s=60.0)
    done = scorer.start([prompt]).results([sample(text=problem.answer), sample(index=1)])
    assert done[0].reward == 0.5 and done[1].reward < 0.5


def test_what_cannot_be_sent_to_a_function_is_refused_before_a_run():
    (reward,) = scorer_of("everything").rewards
    assert reward.check
    with pytest.raises(ScoreError, match="cannot be sent to the function's process"):
        reward.check("17", {"level": 3, "score": lambda text: 1.0})
    reward.check("17", {"level": 3, "score": float})
    scorer_of("reference").rewards[0].check("17", {"score": lambda text: 1.0})


def test_prompts_are_matched_by_id():
    scorer = scorer_of("reference")
    prompts = [Prompt(5, (), "", "50"), Prompt(3, (), "", "30")]
    done = scorer.start(prompts).results([sample(3), sample(5), sample(3, 1)])
    assert [s.reward for s in done] == [30.0, 50.0, 30.0]
    assert all(math.isfinite(s.reward) for s in done)


def echo(meet):
    """A server that meets the others, then scores each sample by its index."""

    def answer(handler, body):
        meet()
        scores = [
            {"id": row["id"], "score": int(row["id"].split("/")[1])} for row in body["samples"]
        ]
        data = json.dumps({"scores": scores}).encode()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    return answer


def test_servers_are_asked_while_rules_run(served):
    all_at_once = threading.Barrier(3)

    def party():
        """Waits, the first time, until all three run."""
        first = iter([all_at_once.wait])
        return lambda: next(first, lambda timeout: None)(timeout=30)

    urls = [served.on(echo(party())) for _ in range(3)]

    rule = f"{FUNCTIONS}:asks"
    scorer = make_scorer(
        [
            Reward(name=urls[0]),
            Reward(name=rule, weight=10.0, options={"url": urls[2]}),
            Reward(name=urls[1], weight=100.0),
        ]
    )
    done = scorer.start([PROMPT]).results([sample(index=i) for i in range(3)])
    assert [s.reward for s in done] == [10.0, 111.0, 212.0]
    assert list(done[1].rewards) == [urls[0], rule, urls[1]]  # the config's order


class Hangs:
    """A reward that exceeds its own time limit."""

    def __init__(self, over):
        self.over = over

    def __call__(self, cases):
        self.over.wait(120)
        return []


def test_a_reward_that_hangs_is_left_and_named(served, caplog):
    scorer = make_scorer([Reward(name="accuracy")])
    stuck = BatchReward("stuck", 1.0, Hangs(served.over), total_s=0.2)
    scorer = replace(scorer, rewards=(*scorer.rewards, stuck))
    start = time.monotonic()
    done = scorer.start([PROMPT]).results([sample(index=i) for i in range(2)])
    assert time.monotonic() - start < 60
    assert [s.extra["dropped"] for s in done] == ["reward/stuck/timeout"] * 2
    assert "did not score 2 samples within 0 s" in caplog.text


class Seen:
    """A slow reward: the sample's index, once `go` is set; the batches it got are in `batches`."""

    def __init__(self):
        self.batches, self.go, self.called = [], threading.Event(), threading.Event()

    def __call__(self, requests):
        self.batches.append([request.id for request in requests])
        self.called.set()
        assert self.go.wait(30)
        return [Score(float(request.id.split("/")[1])) for request in requests]


def test_a_slow_reward_scores_what_is_finished_while_others_are_generated(tmp_path):
    slow, quick = Seen(), tmp_path / "calls"
    scorer = scorer_of("record", options={"file": str(quick)})
    scorer = replace(
        scorer, rewards=(*scorer.rewards, BatchReward("slow", 1.0, slow, total_s=30.0))
    )
    samples = [sample(index=index, text=str(index)) for index in range(4)]
    scoring = scorer.start([PROMPT])
    scoring.add(samples[2:3])
    assert slow.called.wait(30) and not quick.exists(), (
        "one batch at a time, and functions at the end"
    )
    scoring.add(samples[3:])
    scoring.add([])
    scoring.add(samples[:1])
    slow.go.set()
    done = scoring.results(samples)  # the one that was not added, too
    assert [s.reward for s in done] == [0.0, 1.0, 2.0, 3.0]
    calls = [json.loads(line)[0] for line in quick.read_text().splitlines()]
    assert calls == ["0", "1", "2", "3"]
    assert slow.batches[0] == ["0/2"] and [id for batch in slow.batches for id in batch] == [
        "0/2",
        "0/3",
        "0/0",
        "0/1",
    ]
    assert len(slow.batches) <= 3


def test_what_a_reward_scored_before_it_hung_is_kept(served):
    def score(requests):
        if requests[0].id != "0/0":
            served.over.wait(120)
        return [Score(7.0)] * len(requests)

    scorer = replace(make_scorer([]), rewards=(BatchReward("stuck", 1.0, score, total_s=0.5),))
    samples = [sample(index=index) for index in range(2)]
    scoring = scorer.start([PROMPT])
    scoring.add(samples[:1])
    while not scoring._workers["stuck"].scores:
        time.sleep(0.01)
    done = scoring.results(samples)
    assert [s.reward for s in done] == [7.0, None] and done[1].extra[
        "dropped"
    ] == "reward/stuck/timeout"


class Breaks(Hangs):
    def __call__(self, cases):
        raise RuntimeError("a defect of ours")


def test_a_reward_that_raises_does_not_end_the_run():
    scorer = make_scorer([Reward(name="accuracy")])
    scorer = replace(scorer, rewards=(BatchReward("broken", 1.0, Breaks(None)),))
    assert score_one(scorer).extra["dropped"] == "reward/broken/error"


def test_causes_reach_the_counts_of_the_step():
    """Worth 0, each under its own name."""
    scorer = make_scorer([Reward(name="code", options={"time_s": 1.0})])
    codes = [
        "print(17)",
        "print(18)",
        "while True: pass",
        "import socket; socket.socket()",
        "x = 1 +",
    ]
    prompt = Prompt(0, (4,), "p", "17", {"tests": {"inputs": [""], "outputs": ["17"]}})

    def generate(requests, version):
        samples = [
            sample(request.prompt.prompt_id, request.index, codes[request.index])
            for request in requests
        ]
        return scorer.start([request.prompt for request in requests]).results(samples)

    class One:
        kept = MappingProxyType({})

        def observe(self, groups):
            pass

        def take(self, count):
            return [prompt]

    rollouts = Rollouts(generate, samples_per_prompt=len(codes), temperature=1.0, run_seed=0)
    rollout = rollouts.collect(One(), 1, version=0)
    assert [s.reward for s in rollout.groups[0].samples] == [1.0, 0.0, 0.0, 0.0, 0.0]
    causes = {name: count for name, count in rollout.counts.items() if name.startswith("reward/")}
    assert causes == {
        f"reward/code/{cause}": 1 for cause in ("wrong_answer", "timeout", "forbidden", "syntax")
    }
    assert rollout.counts["samples/dropped"] == 0


def test_a_server_that_is_gone_stops_the_run_if_no_sample_reaches_it():
    """A server that some samples reach, and one that answers nonsense, lose their samples only."""
    causes = iter(["no_connection", "broken", "no_connection", "http_500", "http_500", "http_500"])
    reward = BatchReward(
        "remote", 1.0, lambda requests: [Score(None, next(causes), "why") for _ in requests], 10.0
    )
    with pytest.raises(
        CheckFailed, match=r"the reward remote is gone: why; start its server again"
    ):
        Scorer((reward,)).start([PROMPT]).results([sample(), sample(index=1)])
    for cause in ("no_connection", "http_500"):
        done = Scorer((reward,)).start([PROMPT]).results([sample(), sample(index=1)])
        assert done[0].extra["dropped"] == f"reward/remote/{cause}" and done[1].reward is None
    assert Scorer((reward,)).start([PROMPT]).results([]) == []
