"""Shows the package's own `cached_property` as the attribute that it is; read by `make docs`."""

from __future__ import annotations

from typing import Any

import griffe

LAZY = "hf_retrieval_assist.system.lazy.cached_property"


class CachedProperties(griffe.Extension):
    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        for name, member in list(cls.members.items()):
            decorators = member.decorators if isinstance(member, griffe.Function) else ()
            if any(decorator.callable_path == LAZY for decorator in decorators):
                shown = griffe.Attribute(
                    name,
                    annotation=member.returns,
                    docstring=member.docstring,
                    lineno=member.lineno,
                    endlineno=member.endlineno,
                )
                shown.labels = {"property"}
                cls.set_member(name, shown)
