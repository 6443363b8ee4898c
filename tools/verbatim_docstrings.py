"""Shows docstrings as they stand in the code, for mkdocstrings (a Griffe extension).

They are plain text with formulas and tables set by spaces, which Markdown would run
together.
"""

from griffe import Extension, Object


class Verbatim(Extension):
    """Fences every docstring."""

    def on_instance(self, *, obj: Object, **kwargs):
        if obj.docstring is not None:
            obj.docstring.value = f"```text\n{obj.docstring.value}\n```"
