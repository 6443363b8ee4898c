"""The experiments that need a GPU, with the kernels interpreted or played by emulators.

Small problems of one family each: what is looked at is the judgement, not the kernels.
"""

import dataclasses
import json
from types import SimpleNamespace

import jax
import pytest

from analysis.__main__ import main
from analysis.agreement import Problem, emulated, lower
from analysis.experiments import flash_attention_2, kernels
from attn_jax.kernels import architecture
from attn_jax.kernels.interpreter import interpreted
from tests.child_process import in_child_process

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("shared_programs")]
SQUARE = Problem(T=96, S=96, N=8, K=8, H=64, is_causal=False)
EVEN = Problem(T=64, S=128, N=2, K=1, H=64, is_causal=False)


def verdicts(rows, **columns):
    return [
        row["verdict"]
        for row in rows
        if row["verdict"] and all(row[name] == x for name, x in columns.items())
    ]


def interpreted_rows(devices):
    # As many as here, so that the emulator's programs are the same.
    jax.config.update("jax_num_cpu_devices", devices)
    architecture.default_device = lambda: SimpleNamespace(compute_capability="9.0")
    with interpreted():
        return list(kernels.measure([EVEN], ["uniform"], 1))


def test_kernels_pass_and_wrong_recipes_are_told_apart():
    rows = in_child_process(
        interpreted_rows, jax.device_count(), seconds=180, alone=True
    )
    assert verdicts(rows, recipe=kernels.OWN) == ["PASS"] * 5
    # On these inputs every wrong recipe must show: P in out and dV, delta in dK, and
    # in dQ too without a centre.
    for recipe, count in (("P unrounded", 2), ("delta from O", 1)):
        assert verdicts(rows, recipe=recipe) == ["PASS"] * count
    assert verdicts(rows, recipe="delta from O and no centre") == ["PASS"] * 2


def compare_with(monkeypatch, *names):
    """Leaves out the other recipes: each costs seconds of compilation."""
    every = kernels.recipes
    monkeypatch.setattr(
        kernels, "recipes", lambda own: {name: every(own)[name] for name in names}
    )


def played_by_the_emulator(recipe):
    """In place of the kernels, the emulator under one of their comparisons' recipes."""

    def lowered(problem, seeds):
        followed = kernels.recipes(kernels._own_recipe(problem))[recipe]
        return kernels._lower_emulator(followed, problem, seeds)

    return lowered


def test_unrounded_p_is_told_apart_on_tensor_cores_at_large_lse(monkeypatch):
    kernel = played_by_the_emulator(kernels.ON_TENSOR_CORES)
    monkeypatch.setattr(kernels, "_lower_kernels", kernel)
    compare_with(monkeypatch, kernels.OWN, kernels.ON_TENSOR_CORES, "P unrounded")
    rows = list(kernels.measure([EVEN], ["lse+150"], 1))
    assert verdicts(rows, recipe="P unrounded") == ["PASS"] * 2
    # Against sums to nearest it hardly is: cut-off sums alone turn half as many
    # roundings of P as there are.
    out = {row["recipe"]: row["rms"] for row in rows if row["tensor"] == "out"}
    assert out["P unrounded"] < 1.5 * kernels.TOLD_APART * out[kernels.OWN]


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param("P unrounded", marks=pytest.mark.thorough),
        pytest.param("delta from O and no centre", marks=pytest.mark.thorough),
    ],
)
def test_kernels_of_another_recipe_fail(recipe, tmp_path, monkeypatch, capsys):
    kernel = played_by_the_emulator(recipe)
    monkeypatch.setattr(kernels, "_lower_kernels", kernel)
    compare_with(monkeypatch, kernels.OWN, kernels.ON_TENSOR_CORES, recipe)
    monkeypatch.setattr(kernels, "PRESETS", {"toy": [EVEN], "default": []})
    options = ["--preset", "toy", "--families", "uniform", "--out", str(tmp_path)]
    assert main(["kernels", *options]) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    tensor = {"P unrounded": "out", "delta from O and no centre": "dq"}[recipe]
    assert "disagree" in message and f"own {tensor} uniform" in message
    # The figures are kept, and say where they come from.
    (described,) = tmp_path.glob("*.json")
    assert json.loads(described.read_text())["canaries"]["passed"]
    (table,) = tmp_path.glob("*.csv")
    assert f"{recipe},{tensor},0.0," in table.read_text()


def test_kernels_need_a_hopper_gpu(capsys):
    assert main(["kernels", "--preset", "toy"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "Hopper" in line


def following(**changes):
    """FlashAttention-2 played by the emulator, some of its recipe changed."""

    def kernel(problem, inputs):
        followed = dataclasses.replace(flash_attention_2.recipe(problem), **changes)
        seeds = len(inputs.query)
        program = lower(emulated(followed, problem), problem, seeds).compile()
        return jax.device_get(program(*inputs))

    return kernel


def test_flash2_in_other_tiles_is_predicted():
    # Other tiles round P at other maxima: a different draw of the same law.
    kernel = following(block_kv=24, kv_order="forward")
    rows = list(flash_attention_2.measure([SQUARE], ["uniform"], 1, kernel))
    assert verdicts(rows) == ["PASS"] * 5
    assert next(row["differ"] for row in rows if row["tensor"] == "out") > 0


def test_another_recipe_than_flash2_is_not_predicted(tmp_path, monkeypatch, capsys):
    torch = SimpleNamespace(__version__="0.0")
    monkeypatch.setattr(flash_attention_2, "_import_torch", lambda: torch)
    monkeypatch.setattr(flash_attention_2, "_flash", following(delta_source="o_f32"))
    presets = {"toy": [SQUARE], "default": []}
    monkeypatch.setattr(flash_attention_2, "PRESETS", presets)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    options = ["--preset", "toy", "--families", "uniform", "--seeds", "1"]
    assert main(["flash-attention-2", *options, "--out", str(tmp_path)]) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert "dq uniform" in message and "out uniform" not in message
    (described,) = tmp_path.glob("*.json")
    described = json.loads(described.read_text())
    assert described["torch"] == "0.0" and described["canaries"]["passed"]


def test_flash_attention_2_needs_torch(monkeypatch, capsys):
    def absent(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(flash_attention_2.importlib, "import_module", absent)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    assert main(["flash-attention-2", "--preset", "toy"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "install torch" in line
