#!/bin/sh
# tools/environment.sh EXTRA[,EXTRA...] [VERSION]
#
# Makes .venv and installs this checkout in it, editable, with the extras named and
# the versions of constraints.txt. Does nothing where that has been done already.
# PYTHON=/path/to/python names the Python to use; without it one is looked for.
# With VERSION, such as 0.12.0.1, it is that JAX, in .venv-jax-VERSION.
set -eu
cd "$(dirname "$0")/.."
extras=$1
jax=${2:-}
venv=.venv${jax:+-jax-$jax}
stamp=$venv/installed-$(echo "$extras" | tr , +)
unfinished=$venv/unfinished
key=$(pwd && cat pyproject.toml constraints.txt | cksum)

say() { printf '%s\n' "$*" >&2; }

# A pyenv shim may exist and fail, and Debian ships Python without venv: run it.
usable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' \
        2>/dev/null
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        usable "$PYTHON" && echo "$PYTHON"
        return
    fi
    for candidate in python3.12 \
        "$(uv python find --no-project 3.12 2>/dev/null || true)" \
        "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.12*/bin/python3 \
        "${HOME:-}"/.local/share/uv/python/cpython-3.12*/bin/python3 \
        /usr/local/bin/python3.12 /usr/bin/python3.12 \
        python3 python3.13 python3.14; do
        if [ -n "$candidate" ] && usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

if "$venv/bin/python" -c '' 2>/dev/null && [ "$(cat "$stamp" 2>/dev/null)" = "$key" ]; then
    exit 0
fi

# The mark is there while pip works: an installation that was killed is made anew.
if [ -e "$venv" ] && { [ -e "$unfinished" ] || ! usable "$venv/bin/python" ||
    ! "$venv/bin/python" -c 'import pip' 2>/dev/null; }; then
    say "Replacing $venv: it is incomplete or its Python does not run."
    rm -rf "$venv"
fi
if [ ! -e "$venv" ]; then
    python=$(find_python) || {
        say "No usable Python ${PYTHON:-3.12 or newer}: install Python 3.12 with its venv module, or name one, e.g. make train PYTHON=/path/to/python3.12"
        exit 1
    }
    say "Making $venv with $("$python" -V) ..."
    mkdir "$venv"
    : >"$unfinished"
    "$python" -m venv "$venv"
fi
: >"$unfinished"
say "Installing attn_jax[$extras] into $venv (minutes on the first run) ..."
constraints=constraints.txt
if [ -n "$jax" ]; then
    constraints=$venv/constraints.txt
    sed -E "s/^(jax|jaxlib|jax-cuda1[23]-[a-z]+)==.*/\1==$jax/" constraints.txt >"$constraints"
fi
# Byte code is written on first import: compiling all of it here takes longer.
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
    --constraint "$constraints" --editable ".[$extras]" || {
    rm -f "$unfinished" # pip undoes what it could not finish
    say "Installation failed: pip's message is above. Run the same command again."
    exit 1
}
rm -f "$unfinished"
printf '%s\n' "$key" >"$stamp"
