"""A user's own logs: judged as far as they go, refused in one line where they are wrong."""

from __future__ import annotations

import json
import shutil

import pytest
from synthetic import Truth, build

from reports.against import describe, judge_logs, material_of, read_log
from reports.claims import BY_ID
from reports.judge import judge


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build(tmp_path_factory.mktemp("run"))


def logs_of(folder, *arms, seeds=(0, 1, 2)):
    return [read_log(str(folder.arm(arm, seed).metrics)) for arm in arms for seed in seeds]


def verdicts(logs, claims=tuple(BY_ID)):
    return {entry.claim: entry for entry in judge_logs(logs, claims, str)}


def test_metrics_of_a_whole_run_give_the_verdicts_of_the_run(folder):
    """C5 and C8 read nothing but the logs, so the two ways must agree number by number."""
    logs = logs_of(folder, *[arm.name for arm in judge_config(folder)])
    mine, theirs = verdicts(logs, ("C5", "C8")), {v.claim: v for v in judge(folder).verdicts}
    for claim in ("C5", "C8"):
        for side in ("paper", "ours"):
            a, b = getattr(mine[claim], side), getattr(theirs[claim], side)
            assert (a.verdict, a.effect, a.interval, a.n) == (b.verdict, b.effect, b.interval, b.n)
    assert mine["C5"].paper.verdict == "refuted"


def judge_config(folder):
    from reports.config import RunConfig

    return RunConfig.read(folder.config).arms


def test_a_log_alone_says_of_every_claim_why_not(folder):
    found = verdicts(logs_of(folder, "identity-momentum", seeds=(0,)))
    assert list(found) == list(BY_ID)
    for entry in found.values():
        assert entry.paper.verdict in ("not testable here", "inconclusive"), entry.claim
        assert entry.paper.reason and "\n" not in entry.paper.reason
    assert "validate --claims C3" in found["C3"].paper.reason
    assert "1 seed" in found["C2"].paper.reason  # its rows of T6 are there, but one seed decides nothing


def state(losses, evals, every=5, rate=1e-4, **changes):
    rows = [{"step": (i + 1) * every, "loss": loss, "learning_rate": rate} for i, loss in enumerate(losses)]
    rows += [{"step": step, "eval_loss": loss} for step, loss in evals.items()]
    last = len(losses) * every
    rows.append({"step": last, "train_runtime": 2.0 * last})
    return {"global_step": last, "max_steps": last, "log_history": rows} | changes


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_states_of_a_trainer_are_judged_by_arm_and_seed(tmp_path):
    """Three seeds of two arms: full ends at 3.0, the other 10 % above, so C5's claim is refuted."""
    arguments = []
    for seed in range(3):
        for arm, final in (("full", 3.0 + 0.01 * seed), ("identity-momentum", 3.3 + 0.012 * seed)):
            path = write(tmp_path / f"{arm}-{seed}.json", state([3.6] * 8, {0: 3.8, 40: final}))
            arguments.append(f"{arm}/{seed}={path}")
    logs = [read_log(argument) for argument in arguments]
    found = verdicts(logs)
    assert found["C5"].paper.verdict == "refuted" and found["C5"].paper.n == 3
    assert abs(found["C5"].paper.effect - 0.1) < 0.01
    said = describe(logs[0])
    assert (said["status"], said["final_loss"], said["loss_at_start"]) == ("done", 3.0, 3.8)


def test_a_diverged_trainer_run_is_seen_by_the_same_rule(tmp_path):
    path = write(tmp_path / "t.json", state([3.6, 3.6, *[4.7] * 6], {0: 3.8, 40: 5.0}))
    said = describe(read_log(f"full/0={path}"))
    # 20 steps of mean above 1.2 * 3.8 = 4.56: with 2 steps of 3.6 among them it is 4.59, with 3 it is 4.535
    assert said["status"] == "diverged" and said["diverged_at"] == 8
    nan = state([3.6, float("nan")], {0: 3.8})
    said = describe(read_log(f"full/0={write(tmp_path / 'n.json', nan)}"))
    assert said["status"] == "diverged" and said["diverged_at"] == 5
    assert any("no final loss" in note for note in said["notes"])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", "{", "not JSON"),
        ("b.json", {"x": 1}, "log_history"),
        ("c.json", state([3.6], {5: 3.5}), "eval_on_start"),
        ("d.json", state([], {0: 3.5}), "no training loss"),
        ("e.json", {"global_step": "x", "max_steps": 3, "log_history": []}, "global_step"),
        ("f.jsonl", "{}\n", "line 1"),
        ("g.jsonl", "", "no header"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path, name, content, said):
    path = write(tmp_path / name, content)
    argument = f"full/0={path}" if path.suffix == ".json" else str(path)
    with pytest.raises(ValueError, match=said) as caught:
        read_log(argument)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_labels_are_checked(tmp_path, folder):
    path = write(tmp_path / "t.json", state([3.6], {0: 3.8, 5: 3.5}))
    with pytest.raises(ValueError, match="does not say which arm"):
        read_log(str(path))
    with pytest.raises(ValueError, match="'identity-momentum'"):
        read_log(f"identity-momentun/0={path}")
    with pytest.raises(ValueError, match="cannot be read"):
        read_log(f"full/0={tmp_path / 'none.json'}")
    with pytest.raises(ValueError, match="names its own arm"):
        read_log(f"full/0={folder.arm('full', 0).metrics}")
    copy = tmp_path / "again.jsonl"
    shutil.copy(folder.arm("full", 0).metrics, copy)
    logs = [read_log(str(copy)), *logs_of(folder, "full", seeds=(0,))]
    with pytest.raises(ValueError, match="is also in"):
        material_of(logs)


def test_a_reduced_rate_belongs_to_the_run_of_its_own_rate(tmp_path):
    """full at eta/sqrt(p) logs half the rate; the judge must put it beside the arms at eta (T9)."""
    folder = build(tmp_path, Truth(without=(("full-eta-over-p", 1),)))
    material = material_of(logs_of(folder, "full", "full-eta-over-sqrt-p", "exact-momentum"))
    assert len(material.runs) == 1 and len(material.runs[0].config.arms) == 3
    found = verdicts(logs_of(folder, "full", "full-eta-over-sqrt-p", "exact-momentum"), ("C2",))["C2"]
    assert found.ours.parts[1].verdict == "supported"
