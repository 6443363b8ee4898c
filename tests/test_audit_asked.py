"""What `audit_attention` is asked for: taken, or refused at once in one line."""

import dataclasses
import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import audit
from attn_jax.audit import audit_attention
from attn_jax.audit.inputs import Shape
from attn_jax.audit.target import Adapter, Target, TargetError
from attn_jax.recipe import FLASH2

SHAPE = Shape(2, 32, 32, 4, 2, 16)
SMALL = dict(shapes=[SHAPE], families=["normal", "uniform"], masks=["full", "causal"])


def attention(query, key, value):
    raise AssertionError("nothing of it is run")


@pytest.mark.ci
def test_shapes_may_be_plain_numbers():
    options = SMALL | dict(shapes=[[2, 32, np.int64(32), 4, 2, 16]], masks=["full"])
    report = audit_attention("reference", **options, gradients=False, against=[FLASH2])
    assert isinstance(report, audit.Report) and report.settings["groups"][0][0][4] == 2
    assert audit.Shape is Shape and audit.Adapter() == Adapter()


@pytest.mark.parametrize("shape", [(2, 32), (2, 32, 32, 4, 2, 16, 1)])
def test_what_is_no_shape_is_refused_at_once(shape):
    with pytest.raises(TypeError, match="a shape is six integers .B, T, S, N, K, H."):
        audit_attention("xla", shapes=[shape])


def test_bad_arguments_are_refused():
    with pytest.raises(TargetError, match="no target 'flash'"):
        audit_attention("flash")
    with pytest.raises(ValueError, match="no dtype 'int8'"):
        audit_attention("xla", dtype="int8")
    with pytest.raises(ValueError, match="no family 'gauss'"):
        audit_attention("xla", families=["gauss"])


@pytest.mark.parametrize(
    ("dtype", "shapes"),
    [(jnp.bfloat16, SHAPE), (np.dtype(jnp.bfloat16), dataclasses.astuple(SHAPE))],
)
def test_one_name_and_a_type_itself_are_taken(dtype, shapes):
    """As others take them: a text is no list of its letters."""
    report = audit_attention(
        "reference",
        shapes=shapes,
        dtype=dtype,
        families="normal",
        masks="full",
        gradients=False,
        against=FLASH2,
    )
    (cell,) = report.cells
    assert (cell.family, cell.mask, cell.dtype) == ("normal", "full", "bfloat16")
    assert cell.status == "measured" and report.settings["dtype"] == "bfloat16"


@pytest.mark.parametrize("name", ["shapes", "families", "masks"])
def test_nothing_is_not_taken_for_the_usual(name):
    with pytest.raises(ValueError, match=f"{name} is empty: give one at least"):
        audit_attention(attention, **{name: []})


def test_a_class_is_no_function():
    says = "Shape is a class: give a function, or an instance of it"
    with pytest.raises(TypeError, match=says):
        audit_attention(Shape)


# By what is asked for, the error. The suite's own check of types would come first.
WRONG = {
    "audit_attention(None)": (
        "TypeError: fn is a function, the name of one or a Target, not 'NoneType'"
    ),
    "audit_attention(7)": "not 'int'",
    "audit_attention(np.ones(3))": "not 'ndarray'",
    "audit_attention(Target('of no function', 7))": "not 'int'",
    "audit_attention(max, adapter='BNTH')": (
        "TypeError: adapter is an Adapter, such as Adapter(layout='BNTH'), not 'BNTH'"
    ),
    "audit_attention(Target('of max', max), adapter=Adapter(layout='BNTH'))": (
        "TypeError: fn is a Target, whose adapter counts: give it there"
    ),
    "audit_attention(max, families=7)": "TypeError: families is a sequence, or None",
    "audit_attention(max, shapes=(2, 32))": "six integers (B, T, S, N, K, H) such",
    "audit_attention(max, against='flash2')": "RECIPES['flash2'], got 'flash2'",
    "audit_attention(max, shapes=7)": "TypeError: shapes is a sequence, or None",
    "audit_attention(max, dtype='gauss')": "ValueError: no dtype 'gauss'; there are ",
    "audit_attention(max, dtype=None)": "ValueError: no dtype None; there are bfloat16",
    "audit_attention(max, dtype=float)": "ValueError: no dtype <class 'float'>; there",
    "Adapter(layout='BHTD')": "TargetError: no layout 'BHTD'; there are BTNH, BNTH",
    "Adapter(scale='out')": "no scale 'out'; there are keyword, positional, none, out",
    "Adapter(lse_layout='BHT')": "no lse_layout 'BHT'; there are BTN, BNT",
    "Adapter(lse_base=2)": "no lse_base 2; there are e, 2",
    "Adapter(lse=True)": "lse is the name of an argument, 'always' or None, not True",
    "Adapter(renamed='a=b')": "renamed is a dictionary by name, not 'a=b'",
    "Adapter(more=['foo'])": "more is a dictionary by name, not ['foo']",
    "Adapter(shards=0)": "shards is a whole number from 1, not 0",
    "Adapter(shards='8')": "shards is a whole number from 1, not '8'",
}
PROGRAM = """
import json, sys
import numpy as np
from attn_jax.audit import Adapter, audit_attention
from attn_jax.audit.target import Target

said = {}
for asked in json.loads(sys.argv[1]):
    try:
        said[asked] = repr(eval(asked))
    except Exception as error:
        said[asked] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""


def test_what_is_of_another_type_is_refused_in_one_line():
    """It was a fault of the function, taken for the usual, or an error of ours."""
    command = [sys.executable, "-c", PROGRAM, json.dumps([*WRONG])]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    said = json.loads(process.stdout)
    assert [asked for asked in WRONG if WRONG[asked] not in said[asked]] == [], said
    assert all("\n" not in line for line in said.values())


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((1, 8, 8, 3, 2, 8), "2 key heads do not divide 3 query heads"),
        ((1, 8, 8, 2, 0, 8), r"numbers from 1, not \(1, 8, 8, 2, 0, 8\)"),
        ((1, -8, 8, 2, 2, 8), "numbers from 1"),
    ],
)
def test_sizes_of_no_attention_are_refused(sizes, says):
    """They were a fault of the function."""
    with pytest.raises(ValueError, match=says):
        audit_attention(attention, shapes=[sizes])
    with pytest.raises(ValueError, match=says):
        Shape(*sizes)


def test_an_argument_that_a_function_lacks_is_the_callers():
    adapter = Adapter(more={"foo": 1})
    with pytest.raises(TargetError, match="attention has no argument 'foo' to be"):
        audit_attention(attention, adapter=adapter)
    Target("any", lambda q, k, v, **more: q, adapter).check_given()
