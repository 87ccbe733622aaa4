"""Arms by name and by options: what is filled in, what is refused, and that older records still read."""

from __future__ import annotations

import dataclasses
import math

import pytest
import synthetic

from reports.arms import DEFAULT_ARMS, NAMED_ARMS, ArmConfig
from reports.claims import BY_ID
from reports.config import RunConfig
from reports.judge import reproduce_command
from reports.metrics import Header
from reports.rules.idle import judge_idle
from reports.run import load_run


def arm(**settings):
    return ArmConfig.model_validate({"name": "a", **settings})


def test_every_named_arm_can_be_asked_for_by_name():
    config = RunConfig().override([f"arms={list(NAMED_ARMS)}", "quantization=null"])
    assert [a.name for a in config.arms] == list(NAMED_ARMS)
    assert RunConfig.from_mapping(config.to_mapping()) == config
    for name in (
        "lisa", "freeze-lowest", "freeze-highest", "surgical-first", "surgical-middle", "surgical-last",
        "importance", "cached", "stochastic-depth", "mezo", "mlp-frozen", "certified", "shuffled",
    ):  # fmt: skip
        assert name in NAMED_ARMS
    assert list(DEFAULT_ARMS) == RunConfig().arms


def test_what_a_method_leaves_no_choice_in_is_filled_in():
    lisa = arm(method="lisa")
    assert (lisa.backward, lisa.idle, lisa.schedule) == ("exact", "frozen", "cyclic")
    assert lisa.options == {
        "parameters": "adapters", "active_layers": None, "period": 5, "moments": "keep", "learning_rate": None,
    }  # fmt: skip
    assert arm(method="mezo").backward == "full"
    assert arm(backward="certified").options == {"min_cosine": 0.5, "refresh_every": 50}
    assert arm(backward="exact", schedule="fixed", options={"fixed_layers": [2]}).options == {
        "fixed_layers": [2]
    }
    assert arm(backward="exact").options == {}


def test_options_by_set_and_their_own_learning_rate():
    config = RunConfig().override(["arms=lisa,mezo", "arms.lisa.options.period=3"])
    config = config.override(["arms.mezo.options.learning_rate=1e-6", "arms.mezo.options.epsilon=0.01"])
    lisa, mezo = config.arms
    assert lisa.options["period"] == 3 and mezo.options["epsilon"] == 0.01
    assert mezo.learning_rate(1e-4, 4) == 1e-6
    assert lisa.learning_rate(1e-4, 4) == 1e-4
    control = arm(method="cached", learning_rate_rule="eta/sqrt(p)")
    assert control.learning_rate(1e-4, 4) == pytest.approx(1e-4 / math.sqrt(4))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "lsia"}, "expected 'lisa'"),
        ({"method": "lisa", "options": {"perid": 3}}, "unknown option 'perid'"),
        ({"method": "lisa", "options": {"perid": 3}}, "expected 'period'"),
        ({"method": "lisa", "options": {"period": 0}}, "options.period is 0"),
        ({"method": "lisa", "options": {"moments": "forget"}}, "options.moments is 'forget'"),
        ({"method": "lisa", "idle": "momentum"}, "idle is 'momentum', expected frozen for the method 'lisa'"),
        ({"method": "lisa", "schedule": "shuffled"}, "schedule is 'shuffled', expected cyclic"),
        ({"method": "mezo", "backward": "exact"}, "backward is 'exact', expected full for the method 'mezo'"),
        ({"method": "mezo", "options": {"epsilon": -1}}, "options.epsilon is -1"),
        ({"method": "cached", "backward": "identity"}, "expected exact for the method 'cached'"),
        ({"method": "freeze"}, "options.frozen is missing for 'freeze'"),
        ({"method": "surgical", "options": {"third": "frist"}}, "options.third is 'frist'"),
        ({"method": "stochastic-depth", "options": {"last_survival": 1.0}}, "options.last_survival is 1.0"),
        ({"backward": "exact", "options": {"period": 3}}, "unknown option 'period'"),
        ({"backward": "exact", "options": {"period": 3}}, "expected no option at all"),
        ({"backward": "exact", "schedule": "fixed"}, "options.fixed_layers is missing"),
        ({"backward": "exact", "schedule": "greedy"}, "for simulations only"),
        ({"backward": "certified", "schedule": "importance"}, "needs a schedule with blocks"),
        ({"backward": "exact", "schedule": "adaptive"}, "give options.seconds_per_step"),
        ({"backward": "certified", "options": {"min_cosine": 1.0}}, "options.min_cosine is 1.0"),
        ({}, "arms.0.backward is missing"),
    ],
)
def test_wrong_arms_are_one_line(settings, message):
    with pytest.raises(ValueError) as error:
        RunConfig.from_mapping({"arms": [{"name": "a", **settings}]}, "file.yaml")
    assert message in str(error.value)
    assert str(error.value).startswith("file.yaml: ") and "\n" not in str(error.value)


def test_unknown_arm_names_the_nearest():
    with pytest.raises(ValueError, match="expected 'surgical-first'"):
        RunConfig().override(["arms=[surgical-frist]"])


def test_whole_layers_are_refused_on_four_bits():
    with pytest.raises(
        ValueError, match="arm lisa-layers trains whole layers, which needs an unquantised base"
    ) as error:
        RunConfig().override(["arms=[lisa-layers]"])
    assert "\n" not in str(error.value)
    assert RunConfig().override(["arms=[lisa-layers]", "quantization=null"]).arms[0].trains_whole_layers


def test_records_of_before_methods_read():
    """A header without method and options is an arm of LCSB itself."""
    old = {
        "name": "full",
        "backward": "full",
        "idle": "momentum",
        "schedule": "cyclic",
        "learning_rate_rule": "eta",
    }
    header = {
        "kind": "header", "schema": 1, "predictions_sha256": "0" * 64, "arm": old, "seed": 0, "learning_rate": 1e-4,
        "cycle_length": 4, "blocks": [[0]], "n_layers": 1, "steps": 1, "loss_at_start": 3.0,
    }  # fmt: skip
    assert Header.model_validate(header).arm == NAMED_ARMS["full"]


def test_command_names_the_arms():
    config = RunConfig().override(["arms=[full, lisa, certified]"])
    assert reproduce_command(config) == """lcsb validate --set 'arms=["full", "lisa", "certified"]'"""


def test_a_baseline_is_no_evidence_about_idle_momentum(tmp_path):
    """C2 looks at LCSB's own arms: a baseline listed first, with other figures, changes nothing."""
    run = load_run(synthetic.build(tmp_path / "run"))
    cached = NAMED_ARMS["cached"]
    assert (cached.backward, cached.idle, cached.schedule) == ("exact", "momentum", "cyclic")
    config = run.config.model_copy(update={"arms": [cached, *run.config.arms]})
    others = {("cached", seed): run.arms["full-eta-over-p", seed] for seed in config.seeds}
    with_baseline = dataclasses.replace(run, config=config, arms={**others, **run.arms})
    assert with_baseline.arm_like("exact", "momentum") == "exact-momentum"
    assert judge_idle(with_baseline, BY_ID["C2"]) == judge_idle(run, BY_ID["C2"])
