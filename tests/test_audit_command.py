"""`audit_attention` and `python -m attn_jax.audit`."""

import importlib
import io
import json
import os
import re
import sys

import jax
import jax.numpy as jnp
import pytest

from attn_jax import machine
from attn_jax.audit import audit_attention, command
from attn_jax.audit.command import _folder, main, parser
from attn_jax.audit.inputs import Shape
from attn_jax.audit.plan import plan
from attn_jax.audit.problem import MASKS
from attn_jax.audit.report import Report
from attn_jax.audit.workers import NotStartedError
from attn_jax.recipe import EXACT_FP32, FLASH2, RECIPES
from tests.knobs import Knobs, attention

SHAPE = Shape(2, 32, 32, 4, 2, 16)
SMALL = dict(shapes=[SHAPE], families=["normal", "uniform"], masks=["full", "causal"])
OPTIONS = ["--shapes", "2,32,32,4,2,16", "--families", "normal", "--masks", "full"]
OPTIONS += ["--against", "flash2", "--no-gradients"]


def wrong(query, key, value, *, scale=None, is_causal=False, return_residual=False):
    """The scale is applied twice."""
    twice = Knobs(scale=lambda scale, H: scale * scale)
    rules = dict(is_causal=is_causal, return_residual=return_residual)
    return attention(twice, query, key, value, scale=scale, **rules)


def run(tmp_path, capsys, *options) -> tuple[int, str, Report]:
    status = main([*options, "--out", str(tmp_path)])
    report = Report.from_json((tmp_path / "report.json").read_text())
    return status, capsys.readouterr().out, report


def test_an_exact_function_is_trustworthy(tmp_path, capsys):
    status, text, report = run(tmp_path, capsys, "reference", *OPTIONS)
    assert status == 0 == report.exit_code and report.verdict == "trustworthy"
    assert "trustworthy" in text and str(tmp_path / "report.html") in text
    assert "<svg" in (tmp_path / "report.html").read_text()
    assert report.cells[0].errors["out"]["units"] == pytest.approx(1, abs=0.01)
    assert report.environment["jax"] == jax.__version__
    assert "normal" in text and report.canaries


def wandering(query, key, value, *, scale=None, is_causal=False):
    os.chdir("/")
    rules = dict(scale=scale, is_causal=is_causal)
    return attention(Knobs(), query, key, value, **rules)


class Odd:
    """Has no attribute that can be asked for."""

    def __call__(self, query, key, value):
        return query

    def __getattr__(self, name):
        raise KeyError(name)


odd = Odd()


def test_a_report_lies_where_the_audit_began(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sys.modules.setdefault(__name__, sys.modules[wrong.__module__])
    status = main([f"{__name__}:wandering", *OPTIONS, "--out", "here"])
    assert status == 0 and os.getcwd() == "/"
    names = {"parts.jsonl", "report.json", "report.html"}
    assert {path.name for path in (tmp_path / "here").iterdir()} == names


def test_an_object_that_cannot_be_asked_for_attributes_is_refused(tmp_path, capsys):
    sys.modules.setdefault(__name__, sys.modules[wrong.__module__])
    with pytest.raises(SystemExit, match="^2$"):
        main([f"{__name__}:odd", *OPTIONS, "--out", str(tmp_path)])
    said = capsys.readouterr().err.strip().splitlines()
    assert "does not run" in said[-1] and "KeyError" in said[-1]


def test_a_wrong_one_is_named_and_ends_with_4(tmp_path, capsys):
    name = f"{__name__}:wrong"
    sys.modules.setdefault(__name__, sys.modules[wrong.__module__])
    status, text, report = run(tmp_path, capsys, name, *OPTIONS)
    assert status == 4 and report.findings[0].cause == "scale applied twice"
    assert "wrong wiring: scale applied twice" in text


def test_a_whole_audit_of_a_function():
    """Every part has its rows; a recipe is its own prediction, to the bit."""
    parts = []
    report = audit_attention(
        "emulated:flash2", **SMALL, against=[FLASH2, EXACT_FP32], tell=parts.append
    )
    assert len(report.cells) == 4
    assert {cell.status for cell in report.cells} == {"measured"}
    assert report.fits and {row["recipe"] for row in report.attribution} == {"flash2"}
    assert max(row["residual"] for row in report.attribution) == 0
    assert {row["tensor"] for row in report.attribution} >= {"out", "dquery"}
    assert all(probe["passed"] for probe in report.probes) and report.probes
    assert all(
        row["bit_equal"] for row in report.invariances if row["name"] == "re-run"
    )
    assert {row["parts"] for row in report.merges} >= {1, 2, 8}
    assert "16 bits" in report.merging and report.growth.keys() >= {"out", "lse"}
    kinds = {finding.kind for finding in report.findings}
    assert kinds == {"as accurate as its algorithm allows, which is poor here"}
    delta = [f for f in report.findings if "delta" in f.cause and "dquery" in f.tensors]
    assert delta and "uniform" in delta[0].says
    names = [progress.part for progress in parts]
    assert any("flash2 on" in name for name in names) and "probes" in names
    assert all(0 <= p.done < p.known for p in parts)


def test_shapes_for_one_packed_array_have_as_many_keys_as_queries():
    assert any(g.shape.key_heads < g.shape.heads for g in plan())
    assert all(g.shape.key == g.shape.query for g in plan(packed=True))


def test_the_first_shape_is_measured_under_every_mask_and_with_a_bias():
    groups = plan([SHAPE, Shape(1, 64, 64, 2, 2, 16)])
    assert [group.mask for group in groups] == [*MASKS, "full", "causal"]
    (biased,) = (group for group in groups if group.mask == "bias")
    assert biased.shape == SHAPE and "normal" in biased.families


@pytest.mark.ci
@pytest.mark.parametrize(
    "gradients", [False, pytest.param(True, marks=pytest.mark.thorough)]
)
def test_a_bias_alone_is_audited(gradients):
    """What looks at the target itself does so without one."""
    options = SMALL | dict(families=["normal"], masks=["bias"], gradients=gradients)
    name = "attn_jax_hopper"
    against = [RECIPES[name], EXACT_FP32]
    report = audit_attention(f"emulated:{name}", **options, against=against)
    assert report.verdict == "trustworthy" and report.fits, report.findings
    (cell,) = report.cells
    assert ("dbias" in cell.errors) == gradients
    if gradients:
        # Rounded once: delta comes from an O that is not.
        assert cell.errors["dbias"]["units"] == pytest.approx(1, abs=0.02)
        assert report.probes and all(probe["passed"] for probe in report.probes)
        assert report.merges and report.invariances


@pytest.mark.ci
def test_of_what_is_exact_only_the_mode_is_said():
    """The reference is FP64 under x64. Parts of its out, in 16 bits, would merge with
    an error, which is no fault of its."""
    report = audit_attention("reference", **SMALL, against=[FLASH2, EXACT_FP32])
    assert {finding.cause for finding in report.findings} == {"x64 mode"}
    assert report.attribution == [] or report.fits
    assert len(report.merges) >= 10 and report.probes and report.invariances


def test_an_interrupted_audit_goes_on(tmp_path):
    """What is there is not measured again, and the report is the same."""
    told = []

    def stop(progress):
        told.append(progress.part)
        if len(told) == 4:
            raise KeyboardInterrupt

    options = SMALL | dict(gradients=False, against=[FLASH2], folder=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        audit_attention("reference", **options, tell=stop)
    lines = (tmp_path / "parts.jsonl").read_text().splitlines()
    done = [line["cell"]["part"] for line in map(json.loads, lines) if "cell" in line]
    rest = []
    report = audit_attention("reference", **options, tell=rest.append)
    assert done and not set(done) & {progress.part for progress in rest}
    again = []
    same = audit_attention("reference", **options, tell=again.append)
    assert [progress.part for progress in again] == ["canaries"]
    assert same.cells == report.cells and same.findings == report.findings


@pytest.mark.ci
def test_an_edited_function_is_measured_anew(tmp_path, capsys, monkeypatch):
    """Be it in a module beside its own. One that was not is taken from the folder."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    helper = tmp_path / "edited_helper.py"
    (tmp_path / "edited.py").write_text(
        "import jax\n"
        "from edited_helper import FACTOR\n"
        "def attention(query, key, value, *, scale):\n"
        "    return FACTOR * jax.nn.dot_product_attention(\n"
        "        query, key, value, scale=scale)\n"
    )

    def audited(factor: int) -> tuple[int, str]:
        helper.write_text(f"FACTOR = {factor}\n")
        for name in ("edited", "edited_helper"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        out = str(tmp_path / "out")
        status = main(["edited:attention", *OPTIONS, "--out", out])
        return status, capsys.readouterr().err

    assert audited(1) == (0, "")
    status, said = audited(1)
    assert status == 0 and len(said.splitlines()) == 1
    assert re.match(
        r"(\d+) of \1 parts taken from .*; .*\(--fresh\) measures anew", said
    )
    status, said = audited(2)
    assert status == 4 and len(said.splitlines()) == 1
    assert "the code changed since" in said


def test_shapes_of_equal_lengths_are_kept_apart(tmp_path):
    """In the folder, too, where a second call finds them."""
    shapes = [SHAPE, Shape(1, 32, 32, 2, 2, 32), SHAPE]
    options = SMALL | dict(shapes=shapes, families=["normal"], masks=["full"])
    options |= dict(gradients=False, against=[FLASH2], folder=tmp_path)
    for _ in range(2):
        report = audit_attention("reference", **options)
        assert [cell.head_dim for cell in report.cells] == [16, 32]
        assert report.verdict == "trustworthy"


@pytest.mark.parametrize(
    ("installed", "driver", "chosen", "wanted"),
    [
        (["jax_cuda13_plugin"], None, "", "cpu"),
        (["jax_cuda13_plugin"], "/usr/bin/nvidia-smi", "", ""),
        (["jax_cuda13_plugin", "libtpu"], None, "", ""),
        (["jax_cuda13_plugin"], None, "cuda", "cuda"),
        ([], None, "", ""),
    ],
)
def test_without_a_driver_jax_looks_for_no_gpu(
    installed, driver, chosen, wanted, monkeypatch
):
    monkeypatch.setattr(machine.shutil, "which", lambda name: driver)
    monkeypatch.setattr(machine.Path, "exists", lambda path: False)
    monkeypatch.setattr(machine, "_installed", installed.__contains__)
    monkeypatch.setenv("JAX_PLATFORMS", chosen)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", chosen)
    try:
        machine.prefer_cpu_without_driver()
        found = jax.config.jax_platforms, os.environ["JAX_PLATFORMS"]
    finally:
        jax.config.update("jax_platforms", before)
    assert found == (wanted, wanted)


def test_a_report_has_a_folder_by_what_is_audited():
    def folder(*options: str) -> str:
        return str(_folder(parser().parse_args(["context_parallel:ring", *options])))

    plain = "runs/audit/context_parallel-ring"
    assert folder() == folder("--shapes", "2,32,32,4,2,16") == plain
    assert folder("--argument", "layout=zigzag") == f"{plain}-layout-zigzag"
    both = folder("--shards", "64", "--argument", "simulated=true")
    assert both == f"{plain}-simulated-True-shards-64"


@pytest.mark.ci
def test_a_folder_of_another_audit_is_refused(tmp_path, capsys):
    assert main(["reference", *OPTIONS, "--out", str(tmp_path)]) == 0
    with pytest.raises(SystemExit) as ended:
        main(["emulated", *OPTIONS, "--out", str(tmp_path)])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "rows of other settings" in line and "--fresh" in line
    # Of lists, what they do not share.
    with pytest.raises(SystemExit):
        main(["reference", *OPTIONS, "--against", "flash3", "--out", str(tmp_path)])
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "['flash3'] here" in line
    assert main(["reference", *OPTIONS, "--fresh", "--out", str(tmp_path)]) == 0


def test_the_help_has_a_text_for_every_option(capsys):
    assert all(x.help for x in command.parser()._actions if x.option_strings)
    with pytest.raises(SystemExit):
        main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    for text in (
        "batch, queries, keys, query heads, key heads, head dim",
        "Ends with 0 if the function is trustworthy, with 4 if it is not, with 2",
        "130 if it is interrupted",
        "aborts its process",
    ):
        assert text in said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["nothing"], "no target 'nothing'; there are pallas"),
        (["no_such_module:f"], "cannot import no_such_module"),
        (["xla", "--shapes", "2,32"], "a shape is six numbers B,T,S,N,K,H"),
        (["xla", "--shapes", "1,8,8,3,2,8"], "2 key heads do not divide 3"),
        (
            ["xla", "--shapes", "1,1,9999999999999,1,1,8"],
            "4294967296 are tried",
        ),
        (["xla", "--lse", "nosuch"], "xla has no argument 'nosuch' to have LSE by"),
        (["xla", "--argument", "scale=2"], "'scale' is given by the audit itself"),
        (["xla", "--argument", "foo=1"], "xla has no argument 'foo' to be given to"),
        (["xla", "--families", "gauss"], "invalid choice: 'gauss'"),
        (["xla", "--rename", "is_causal"], "stands for it are wanted, not 'is_causal'"),
        (
            ["xla", "--argument", "a=1", "--argument", "a=2"],
            "a is given more than once",
        ),
        (["xla", "--argument", "implementation="], "an empty text is '\"\"'"),
        (["./my/attention.py:f"], "is the name of a file: name its module, such as "),
        (["./my/attention.py:f"], "such as my.attention:f, where Python can import it"),
        (
            ["xla", "--rename", "causal=is_causal"],
            "'causal' is no argument to rename; there are bias, mask, scale, is_causal",
        ),
        (
            ["xla", "--rename", "is_causal=causal"],
            "xla has no argument 'causal' for is_causal; there are query, key, value",
        ),
        (
            ["xla", "--rename", "scale=is_causal"],
            "'is_causal' would be given both scale and is_causal: rename them to",
        ),
        (
            ["reference", "--rename", "mask=bias", "bias=bias"],
            "'bias' would be given both bias and mask",
        ),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_bad_commands_are_refused_in_one_line(options, says, capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        main([*options, "--out", str(tmp_path)])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert says in line


def test_an_option_may_be_given_again():
    """The earlier was lost without a word."""
    text = "xla --masks causal --masks full window --shapes 1,8,8,2,1,8"
    options = parser().parse_args([*text.split(), "--shapes", "1,4,4,2,1,8"])
    assert options.masks == ["causal", "full", "window"]
    assert [x.key_length for x in options.shapes] == [8, 4]
    again = "--argument a=1 --argument b=2 --rename scale=s --rename mask=m"
    options = parser().parse_args(["xla", *again.split()])
    assert options.argument == [("a", 1), ("b", 2)]
    assert options.rename == [("scale", "s"), ("mask", "m")]


def test_of_another_adapter_only_what_differs_is_said(tmp_path, capsys):
    arguments = ["xla", *OPTIONS, "--out", str(tmp_path)]
    assert main(arguments) == 4
    with pytest.raises(SystemExit):
        main([*arguments, "--layout", "BNTH", "--argument", "implementation=cudnn"])
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "(adapter.layout BTNH there, BNTH here, adapter.more.implementation " in line
    assert "implementation xla there, cudnn here)" in line


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("json:dump", "json:dump does not run under jax.jit here: TypeError: dump()"),
        ("cudnn", "(it needs an NVIDIA GPU)"),
        ("attention_mgpu", "--dtype float16"),
    ],
)
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="cuDNN runs on a GPU")
def test_what_does_not_run_at_all_is_no_verdict(name, says, tmp_path, capsys):
    """Each time, since what it lacks may be there by then."""
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            main([name, *OPTIONS, "--out", str(tmp_path)])
        assert ended.value.code == 2
        said = capsys.readouterr()
        (line,) = said.err.strip().splitlines()
        assert says in line and not said.out


def any_arguments(*arrays, **rules):
    return (lambda query, key, value, *, scale: query)(*arrays, **rules)


def any_but_scale(*arrays, **rules):
    return (lambda query, key, value: query)(*arrays, **rules)


def test_what_has_no_lse_behind_any_arguments_is_told_the_option(tmp_path, capsys):
    sys.modules.setdefault(__name__, sys.modules[wrong.__module__])

    def said(name: str, *options: str) -> str:
        options = (*options, *OPTIONS, "--out", str(tmp_path / name))
        with pytest.raises(SystemExit) as ended:
            main([f"{__name__}:{name}", *options])
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        return line

    line = said("any_arguments")
    assert "'return_residual'" in line and "--lse never" in line
    line = said("any_but_scale", "--lse", "never")
    assert "'scale'" in line and "--scale none" in line and "--lse" not in line
    fixed = "--lse", "never", "--scale", "none", "--argument", "foo=1"
    assert "(without foo: leave out --argument)" in said("any_but_scale", *fixed)


def test_a_file_is_no_folder(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SystemExit) as ended:
        main(["xla", "--out", str(tmp_path / "file")])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.endswith("file is a file, and a folder is needed")
    assert (tmp_path / "file").read_text() == "mine"
    for name in ("", "long" * 100):
        with pytest.raises(SystemExit) as ended:
            main(["xla", "--out", name])
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert "name of a folder" in line or "too long" in line


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (KeyboardInterrupt, 130, "interrupted; what is done is kept in"),
        (NotStartedError("no main module"), 2, "no main module"),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
            *(2, "no memory is left for exact results"),
        ),
        (MemoryError, 2, "no memory is left for exact results"),
        (
            RuntimeError("Unable to initialize backend 'tpu'"),
            *(2, "RuntimeError: Unable to initialize backend 'tpu'"),
        ),
    ],
)
def test_what_ends_a_command_is_said(
    error, status, says, tmp_path, capsys, monkeypatch
):
    def ends(*arguments, **options):
        raise error

    monkeypatch.setattr(command, "audit_attention", ends)
    with pytest.raises(SystemExit) as ended:
        main(["xla", "--out", str(tmp_path)])
    assert ended.value.code == status
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert says in line and (status == 2 or str(tmp_path) in line)


def test_a_reader_who_leaves_changes_nothing(tmp_path, monkeypatch):
    with (tmp_path / "standard-output").open("w") as file:

        class Closed(io.StringIO):
            def write(self, text):
                raise BrokenPipeError

            def fileno(self):
                return file.fileno()

        monkeypatch.setattr(sys, "stdout", Closed())
        assert main(["reference", *OPTIONS, "--out", str(tmp_path)]) == 0
    assert (tmp_path / "report.json").exists()


@pytest.mark.parametrize("x64", [False, pytest.param(True, marks=pytest.mark.ci)])
def test_a_target_runs_in_the_users_mode(x64, tmp_path):
    """And what it gives does not depend on the mode that goldens need."""
    seen = []

    def watched(query, key, value, *, scale):
        seen.append(bool(jax.config.read("jax_enable_x64")))
        assert query.dtype == jnp.bfloat16
        return query * jnp.asarray(scale, query.dtype)

    options = SMALL | dict(families=["normal"], masks=["full"])
    options |= dict(gradients=False, against=[FLASH2])
    with jax.enable_x64(x64):
        report = audit_attention(watched, **options)
    assert report.environment["x64"] is x64
    # Once under the other mode, on purpose.
    assert seen.count(not x64) == 1
    assert json.loads(report.to_json())["target"].endswith("watched")
