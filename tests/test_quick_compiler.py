"""Programs of tests are compiled quickly, those that are to be a user's are not."""

import pytest
from jax._src import compiler

from tests.child_process import in_child_process
from tests.quick_compiler import _OPTIONS

NAME = b"xla_cpu_disable_new_fusion_emitters"


def _of_flags() -> bytes:
    return compiler.CompileOptions().SerializeAsString()


def _of_a_program() -> bytes:
    return compiler.get_compile_options(1, 1).SerializeAsString()


def test_options_are_those_of_the_flags_that_other_processes_have():
    added = compiler.CompileOptions.ParseFromString(_of_flags() + _OPTIONS)
    assert NAME not in _of_flags() and NAME in _of_a_program()
    assert in_child_process(_of_flags, seconds=60) == added.SerializeAsString()


@pytest.mark.usefixtures("fully_optimised")
def test_a_user_s_programs_are_compiled_as_ever():
    assert NAME not in _of_a_program()
