"""Compiles `cython_ext/*/*.pyx` into the package; everything else stands in pyproject.toml.

Environment switches, read at build time:
    HFRA_DEBUG=1    bounds, None and overflow checks in every structure, no optimisation
"""

import os
from pathlib import Path

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

DEBUG = os.environ.get("HFRA_DEBUG", "0") not in ("", "0")

DIRECTIVES = {
    "language_level": 3,
    "embedsignature": True,
    "boundscheck": DEBUG,
    "wraparound": False,
    "initializedcheck": DEBUG,
    "nonecheck": DEBUG,
    "cdivision": not DEBUG,
    "overflowcheck": DEBUG,
    "freethreading_compatible": False,
}


def compile_args() -> list[str]:
    # Python's own flags ask for warnings, of which what Cython writes has some, and for debug
    # information, which is three quarters of a wheel.
    quiet = ["-Wno-sign-compare", "-Wno-unused-function"]
    return quiet + (["-O1", "-g", "-fno-omit-frame-pointer"] if DEBUG else ["-O3", "-g0"])


class BuildExtensions(build_ext):
    """Compiles as many at once as there are CPUs, and says which."""

    command_name = "build_ext"  # by which setuptools finds the options of an editable install

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def build_extension(self, ext: Extension) -> None:
        number, of = 1 + self.extensions.index(ext), len(self.extensions)
        print(f"[{number:2}/{of}] Compiling {ext.name}", flush=True)
        super().build_extension(ext)


def package_of(source: Path) -> str:
    """Where an extension is imported from: kernels on their own, all else is a structure."""
    return "engines.cpu" if source.parent.name == "kernels" else "structures"


def headers_of(source: Path) -> list[str]:
    """The headers that a source may include: those beside it and the common ones."""
    folders = {source.parent, source.parent.parent / "common"}
    return sorted(str(header) for folder in folders for header in folder.glob("*.h"))


def sources_of(source: Path) -> list[str]:
    """A .pyx and the C files beside it, one for each instruction set."""
    return [str(source), *sorted(map(str, source.parent.glob("*.c")))]


def extensions() -> list[Extension]:
    """One extension per .pyx, named after it, so that a new structure is one new file."""
    return [
        Extension(
            f"hf_retrieval_assist.{package_of(source)}.{source.stem}",
            sources_of(source),
            include_dirs=["cython_ext", "cython_ext/kernels", numpy.get_include()],
            define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")],
            extra_compile_args=compile_args(),
            depends=headers_of(source),
        )
        for source in sorted(Path("cython_ext").glob("*/*.pyx"))
    ]


setup(
    cmdclass={"build_ext": BuildExtensions},
    ext_modules=cythonize(
        extensions(),
        compiler_directives=DIRECTIVES,
        include_path=["cython_ext", "cython_ext/kernels"],
        build_dir="build/debug" if DEBUG else "build/cython",
        force=DEBUG,
    ),
)
