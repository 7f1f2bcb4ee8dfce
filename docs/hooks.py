"""Docstrings name things by Sphinx roles, which this site shows as code."""

import re

_ROLE = re.compile(r":(?:class|meth|func|mod|attr):<code>~?(?:[\w.]*\.)?(\w+)</code>")


def on_page_content(html, **_):
    """A page's HTML with `:class:` and the like resolved to the last part of the name."""
    return _ROLE.sub(r"<code>\1</code>", html)
