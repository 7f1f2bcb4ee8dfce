"""The parts of a model and what they hold, as every call has to look at them: about 50 ns for each entry."""

import sys
from functools import partial
from types import FunctionType, MethodType, ModuleType

import numpy as np
import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.dict cimport PyDict_Next
from cpython.object cimport PyObject
from libc.stdlib cimport free, realloc

cdef extern from "Python.h":
    ctypedef struct TypeStruct "PyTypeObject":
        PyObject* tp_dict
        void* tp_call
        void* tp_descr_get

    ctypedef struct FunctionStruct "PyFunctionObject":
        PyObject* func_dict

    bint PyDict_Check(object)
    Py_ssize_t PyDict_Size(object) except -1
    bint PyObject_TypeCheck(object, TypeStruct*)
    PyObject* PyList_GET_ITEM(list, Py_ssize_t)
    TypeStruct* Py_TYPE(PyObject*)

cdef object TENSOR = torch.Tensor, CONFIG = PreTrainedConfig, GENERATION = GenerationConfig, FUNCTION = FunctionType, MODULE = ModuleType
cdef object METHOD = MethodType, PARTIAL = partial, DEVICE = torch.device, NUMBER = np.generic

# What every module keeps of itself, in the order in which it begins to.
cdef list ORDER = [*vars(nn.Module())]
cdef Py_ssize_t ORDERED = len(ORDER), MODE = ORDER.index("training")

INTERNAL = frozenset(ORDER) - {"training"}
"""The names of that but its mode."""

PLAIN = frozenset((bool, int, float, str, bytes, complex, type(None)))
"""Types whose values are told by what they are."""

# Containers are looked into so deep, and so many members of each attribute.
cdef int DEEPEST = 5
cdef Py_ssize_t MOST = 256


cpdef list modules_of(model):
    """A model and its parts, each once: itself, its children, theirs."""
    cdef PyObject* key
    cdef PyObject* value
    cdef Py_ssize_t at = 0, place
    cdef set found = {model}
    cdef list waiting = [model]
    cdef object parts, part
    while at < len(waiting):
        parts = (<object>PyList_GET_ITEM(waiting, at))._modules
        at += 1
        if type(parts) is not dict:
            parts = dict(enumerate(parts.values()))
        place = 0
        while PyDict_Next(parts, &place, &key, &value):
            part = <object>value
            if part is not None and part not in found:
                found.add(part)
                waiting.append(part)
    return waiting


def hooked(modules):
    """Those of the modules that have hooks round their forwards."""
    return [module for module in modules if module._forward_hooks or module._forward_pre_hooks]


def own_attributes(module, left_out):
    """A module's attributes but those of some names, among them `INTERNAL`."""
    cdef PyObject* key
    cdef PyObject* value
    cdef Py_ssize_t place = 0, at = 0
    cdef dict own = module.__dict__, found = {}
    while PyDict_Next(own, &place, &key, &value):
        if not _is_internal(key, &at, left_out):
            found[<object>key] = <object>value
    return found


cdef inline bint _is_internal(PyObject* name, Py_ssize_t* at, object left_out) except -1:
    """Whether an attribute is left out. Most modules have what all have in one order, in which `at` is the place that was
    got to."""
    if at[0] < ORDERED and name == PyList_GET_ITEM(ORDER, at[0]):
        at[0] += 1
        return at[0] - 1 != MODE
    return <object>name in left_out


cdef inline size_t _id(object value):
    """A value's address."""
    return <size_t><PyObject*>value


def told_of(list modules, dict moving, left_out):
    """What is told of modules, and which configurations they have.

    Told are classes, attributes by name, and names, classes and dtypes of parameters and buffers. Tensors among attributes
    are forwards' own. Buffers of one integer are settings, told by how often they were written to.

    Args:
        modules: a model's.
        moving: names that are left out, by the addresses of modules.
        left_out: names of all modules that are not told, among them `INTERNAL`.
    """
    cdef PyObject* key
    cdef PyObject* value
    cdef Py_ssize_t place, at, left
    cdef object module, names, table
    cdef dict own, configs = {}
    cdef list told = []
    for module in modules:
        own, place, at = module.__dict__, 0, 0
        told.append(_id(type(module)))
        names = moving.get(_id(module), ()) if moving else ()
        while PyDict_Next(own, &place, &key, &value):
            if _is_internal(key, &at, left_out) or PyObject_TypeCheck(<object>value, <TypeStruct*>TENSOR):
                continue
            if PyObject_TypeCheck(<object>value, <TypeStruct*>CONFIG):
                configs[<size_t>value] = <object>value
            if not names or <object>key not in names:
                left = MOST
                told.append(<object>key)
                told.append(_told(<object>value, DEEPEST, &left))
        place, table = 0, own.get("_parameters")
        while table is not None and PyDict_Next(table, &place, &key, &value):
            told.append(<object>key)
            told.append(_id(type(<object>value)))
            told.append(None if <object>value is None else (<object>value).dtype)
        place, table = 0, own.get("_buffers")
        while table is not None and PyDict_Next(table, &place, &key, &value):
            if not names or <object>key not in names:
                told.append(<object>key)
                told.append(_id(type(<object>value)))
                told.append(setting_of(<object>value))
    return told, [*configs.values()]


def setting_of(buffer):
    """What is told of a buffer: its dtype, or how often one integer was written to."""
    if buffer is None:
        return None
    dtype = buffer.dtype
    try:
        if dtype.is_floating_point or dtype.is_complex or buffer.numel() != 1:
            return dtype
        return buffer._version
    except Exception:  # it does not know its size, or nobody counts
        return dtype


def told(value):
    """A single value: plain ones by what they are, few members of containers, all others by which they are."""
    cdef Py_ssize_t left = MOST
    return _told(value, DEEPEST, &left)


cdef object _told(object value, int depth, Py_ssize_t* left):
    """The same; containers are looked into so deep, and so many members of them."""
    cdef object kind = type(value)
    if value is None or kind is str or kind is bool or kind is int or kind is float or kind is bytes or kind is complex:
        return value
    if PyDict_Check(value) or kind is list or kind is tuple or kind is set or kind is frozenset:
        left[0] -= PyDict_Size(value) if PyDict_Check(value) else len(value)
        if depth > 0 and left[0] >= 0:
            return _members(value, kind, depth - 1, left)
    elif PyObject_TypeCheck(value, <TypeStruct*>TENSOR) or PyObject_TypeCheck(value, <TypeStruct*>GENERATION):
        return ...
    elif kind is METHOD:
        return _id(value.__func__), _id(value.__self__)
    elif kind is PARTIAL:
        return _id(value.func), _told(value.args, depth, left), _told(value.keywords, depth, left)
    elif kind is DEVICE:
        return str(value)
    elif PyObject_TypeCheck(value, <TypeStruct*>NUMBER):
        return value.dtype.str, value.tobytes()
    return _id(value)


cdef tuple _members(object value, object kind, int depth, Py_ssize_t* left):
    cdef PyObject* key
    cdef PyObject* held
    cdef Py_ssize_t place = 0
    cdef list found = [_id(kind)]
    if kind is set or kind is frozenset:
        return found[0], frozenset([_told(member, depth, left) for member in value])
    if not PyDict_Check(value):
        for member in value:
            found.append(_told(member, depth, left))
        return tuple(found)
    while PyDict_Next(value, &place, &key, &held):
        found.append(_told(<object>key, depth, left))
        found.append(_told(<object>held, depth, left))
    return tuple(found)


def memory_of(list modules, left_out):
    """Which tensors modules hold, directly and in lists and tables, and where they lie."""
    cdef PyObject* key
    cdef PyObject* value
    cdef Py_ssize_t place, at, left
    cdef object module
    cdef dict own
    cdef list found = []
    for module in modules:
        own, place, at = module.__dict__, 0, 0
        for table in (own.get("_parameters"), own.get("_buffers")):
            place = 0
            while table is not None and PyDict_Next(table, &place, &key, &value):
                if <object>value is not None:
                    _place(found, <object>value)
        place = 0
        while PyDict_Next(own, &place, &key, &value):
            if not _is_internal(key, &at, left_out):
                left = MOST
                _places(found, <object>value, DEEPEST, &left)
    return found


cdef int _places(list found, object value, int depth, Py_ssize_t* left) except -1:
    cdef PyObject* key
    cdef PyObject* held
    cdef Py_ssize_t place = 0
    cdef object kind = type(value)
    if PyObject_TypeCheck(value, <TypeStruct*>TENSOR):
        _place(found, value)
    elif PyDict_Check(value):
        left[0] -= PyDict_Size(value)
        while depth > 0 and left[0] >= 0 and PyDict_Next(value, &place, &key, &held):
            _places(found, <object>held, depth - 1, left)
    elif kind is list or kind is tuple:
        left[0] -= len(value)
        if depth > 0 and left[0] >= 0:
            for member in value:
                _places(found, member, depth - 1, left)
    return 0


cdef int _place(list found, object tensor) except -1:
    """Where a tensor lies, as far as its kind says: those that are sparse, or not there yet, do not. Quantised ones have
    others inside, and the value of one without dimensions goes with the launch."""
    cdef object shape
    found.append(_id(tensor))
    cdef Py_ssize_t left = MOST
    try:
        shape = tensor.shape
        found.append(tensor.data_ptr())
        found.append(shape)
        found.append(tensor.stride() if shape or not tensor.is_cpu else repr(tensor.item()))
    except Exception:  # whatever its kind raises
        found.append(None)
    for inner in tensor.__dict__.values():
        found.append(_told(inner, 0, &left))
        _places(found, inner, 1, &left)
    return 0


def names_of(kinds, aside, spaces):
    """The addresses of what names lead to, as bytes: functions, classes and other objects, in classes and all that they
    inherit from, in the modules that these were written in, those of some `aside` left out, and in further spaces.

    A function that stands for another within a scope, and says so by its attribute `stands_for`, counts as the other.
    """
    cdef PyObject* key
    cdef PyObject* value
    cdef PyObject* inner
    cdef TypeStruct* form
    cdef Py_ssize_t place, inside
    cdef bint whole
    cdef size_t* found = NULL
    cdef size_t size = 0, room = 0, grown
    cdef dict seen = {}, loaded = sys.modules
    cdef object kind, module, table
    cdef list tables = []
    for kind in kinds:
        for base in (<object>kind).__mro__:
            if _id(base) in seen:
                continue
            seen[_id(base)] = None
            if (<TypeStruct*>base).tp_dict != NULL:
                tables.append(<object>(<TypeStruct*>base).tp_dict)
            module = base.__module__
            if module not in seen and base not in aside:
                seen[module] = None
                module = loaded.get(module)
                if module is not None:
                    tables.append(module.__dict__)
    for table in spaces:
        tables.append(table)
    try:
        for table in tables:
            whole = "__path__" not in table
            place = 0
            while PyDict_Next(table, &place, &key, &value):
                form = Py_TYPE(value)
                if size + MOST + 1 > room:
                    room = 2 * room + 4 * MOST
                    grown = <size_t>realloc(found, room * sizeof(size_t))
                    if grown == 0:
                        raise MemoryError(f"names: expected memory for {room} of them, got none")
                    found = <size_t*>grown
                if form == <TypeStruct*>FUNCTION:
                    found[size] = _address(value)
                    size += 1
                elif form.tp_call != NULL or form.tp_descr_get != NULL:
                    found[size] = <size_t>value
                    size += 1
                elif form == <TypeStruct*>MODULE and whole:
                    # A part of a package is there once somebody has loaded it.
                    found[size] = <size_t>value
                    size += 1
                elif form == <TypeStruct*>dict and len(<dict>value) < MOST:
                    inside = 0
                    while PyDict_Next(<object>value, &inside, &key, &inner):
                        if Py_TYPE(inner) == <TypeStruct*>FUNCTION:
                            found[size] = _address(inner)
                            size += 1
        return PyBytes_FromStringAndSize(<char*>found, size * sizeof(size_t))
    finally:
        free(found)


cdef size_t _address(PyObject* function) except 0:
    """A function's, or that of the one that it stands for."""
    cdef PyObject* held = (<FunctionStruct*>function).func_dict
    if held == NULL:
        return <size_t>function
    original = (<dict>held).get("stands_for")
    return <size_t>function if original is None else <size_t><PyObject*>original
