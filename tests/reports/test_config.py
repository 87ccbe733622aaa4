"""RunConfig: presets, YAML, overrides and the messages for wrong settings."""

from __future__ import annotations

import math

import pytest
import yaml

from reports.config import DEFAULT_ARMS, RunConfig


def test_yaml_round_trip(tmp_path):
    config = RunConfig.preset("full").override(["optimizer.learning_rate=3e-4", "quantization=null"])
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert RunConfig.read(path) == config
    assert config.optimizer.learning_rate == 3e-4 and config.quantization is None


def test_standard_is_the_default_and_quick_is_one_seed():
    assert RunConfig.preset("standard") == RunConfig()
    quick = RunConfig.preset("quick")
    assert (quick.seeds, quick.steps, quick.fidelity_batches, quick.timing_cycle_lengths) == (
        [0], 8, 2, [1, 4],
    )  # fmt: skip
    assert [arm.name for arm in RunConfig().arms] == [
        "full", "exact-momentum", "exact-frozen", "identity-momentum", "mlp-momentum",
        "full-eta-over-sqrt-p", "full-eta-over-p",
    ]  # fmt: skip


def test_learning_rate_rules():
    by_name = {arm.name: arm.learning_rate(1e-4, 4) for arm in DEFAULT_ARMS}
    assert by_name["exact-momentum"] == by_name["full"] == 1e-4
    assert by_name["full-eta-over-sqrt-p"] == pytest.approx(1e-4 / math.sqrt(4), rel=1e-15)
    assert by_name["full-eta-over-p"] == pytest.approx(1e-4 / 4, rel=1e-15)


def test_build_order_preset_file_overrides(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("steps: 30\noptimizer: {eps: 1e-6}\narms: [full, exact-frozen]\n", encoding="utf-8")
    config = RunConfig.build("quick", path, ["steps=40", "arms.full.idle=frozen"])
    assert config.steps == 40 and config.seeds == [0]
    assert config.optimizer.eps == 1e-6 and config.optimizer.learning_rate == 1e-4
    assert [(arm.name, arm.idle) for arm in config.arms] == [("full", "frozen"), ("exact-frozen", "frozen")]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("modl=x", "unknown key 'modl', expected 'model'"),
        ("optimizer.learning_rat=1", "unknown key 'optimizer.learning_rat', expected 'learning_rate'"),
        ("arms.ful.idle=frozen", "expected 'full'"),
        ("arms.0.idle=frozn", "arms.0.idle is 'frozn', expected 'frozen'"),
        ("arms=[full, exat-frozen]", "expected 'exact-frozen'"),
        ("arms=[{name: a, backward: full, idl: momentum}]", "unknown key 'arms.0.idl', expected 'idle'"),
        ("arms=[full, full]", "arms: found full twice"),
        ("seeds=[1, 1]", "seeds: found 1 twice"),
        ("seeds=[]", "seeds is []"),
        ("steps=0", "steps is 0"),
        ("steps", "expected key=value"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas.1 is 1.0"),
        ("optimizer.learning_rate=.nan", "optimizer.learning_rate is nan"),
        ("name=../x", "name is '../x'"),
    ],
)
def test_wrong_override_names_the_key_and_the_nearest(override, message):
    with pytest.raises(ValueError) as error:
        RunConfig().override([override])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_wrong_file_is_named(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("optimizer: {learning_rte: 1}\nstep: 3\n", encoding="utf-8")
    with pytest.raises(ValueError) as error:
        RunConfig.build("standard", path, ["steps=4"])
    lines = str(error.value).splitlines()
    assert len(lines) == 2 and all(line.startswith(str(path)) for line in lines)
    assert "expected 'learning_rate'" in lines[0] and "expected 'steps'" in lines[1]
    path.write_text("a: [", encoding="utf-8")
    with pytest.raises(ValueError, match="not YAML"):
        RunConfig.read(path)
    path.write_text("- 1", encoding="utf-8")
    with pytest.raises(ValueError, match="found list, expected a mapping"):
        RunConfig.read(path)
    with pytest.raises(ValueError, match="cannot be read"):
        RunConfig.read(tmp_path / "none.yaml")


def test_layers_per_step():
    config = RunConfig()
    assert [config.layers_per_step(30, p) for p in (1, 2, 4, 8, 30)] == [30, 15, 8, 4, 1]
    assert config.layers_per_step(18) == 5
    with pytest.raises(ValueError, match=r"cycle_length is 7, .* nearest: 6"):
        config.layers_per_step(30, 7)
    with pytest.raises(ValueError, match=r"cycle_length is 4, .* nearest: 3"):
        config.layers_per_step(3)


def test_unknown_preset():
    with pytest.raises(ValueError, match="expected 'standard'"):
        RunConfig.preset("standrd")


def test_yaml_is_plain():
    assert yaml.safe_load(RunConfig().to_yaml())["optimizer"]["betas"] == [0.9, 0.999]
