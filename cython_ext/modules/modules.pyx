"""The parts of a model and what they hold, as every call has to look at them: about 50 ns for each entry."""

import gc
import weakref

import torch
from torch import nn

from cpython.dict cimport PyDict_Next
from cpython.object cimport PyObject
from libc.stdlib cimport calloc, free

cdef extern from "Python.h":
    ctypedef struct TypeStruct "PyTypeObject":
        pass

    bint PyObject_TypeCheck(object, TypeStruct*)
    PyObject* PyList_GET_ITEM(list, Py_ssize_t)

cdef object MODULE = nn.Module
cdef object TENSOR = torch.Tensor

# What every module keeps of itself, in the order in which it begins to.
cdef list ORDER = [*vars(nn.Module())]
cdef Py_ssize_t ORDERED = len(ORDER), MODE = ORDER.index("training")

INTERNAL = frozenset(ORDER) - {"training"}
"""The names of that but its mode."""


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


def held_by(modules):
    """What modules keep: the dictionaries and the lists among their attributes, and tensors, each once, of the attributes
    and of these."""
    cdef PyObject* key
    cdef PyObject* value
    cdef Py_ssize_t place
    cdef list tables = [], lists = []
    cdef dict own, tensors = {}
    for module in modules:
        own, place = module.__dict__, 0
        while PyDict_Next(own, &place, &key, &value):
            if isinstance(<object>value, dict):
                tables.append(<object>value)
            elif type(<object>value) is list:
                lists.append(<object>value)
            else:
                _note_tensor(tensors, <object>value)
    for table in tables:
        place = 0
        while PyDict_Next(<dict>table, &place, &key, &value):
            _note_tensor(tensors, <object>value)
    for members in lists:
        for member in members:
            _note_tensor(tensors, member)
    return tables, lists, [*tensors.values()]


cdef inline int _note_tensor(dict tensors, object value) except -1:
    if PyObject_TypeCheck(value, <TypeStruct*>TENSOR):
        tensors[<size_t><PyObject*>value] = value
    return 0


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


cdef inline bint _is_plain(object value):
    """Whether a value is told by what it is."""
    cdef object kind = type(value)
    return (
        value is None
        or kind is str
        or kind is bool
        or kind is int
        or kind is float
        or kind is bytes
        or kind is complex
    )


# What stands for objects in the order in which they are met: one tuple for each number, so that they are compared by which
# they are.
cdef list NUMBERS = []


cdef object _number(Py_ssize_t n):
    while len(NUMBERS) <= n:
        NUMBERS.append((..., len(NUMBERS)))
    return <object>PyList_GET_ITEM(NUMBERS, n)


cdef class ObjectWalk:
    """Goes through objects that refer to one another, each once, and not into any depth.

    What stands for a value is the value where it is plain, otherwise the number under which it is said what there is to
    say of it. Subclasses say what the parts of objects are.

    Args:
        left_out: names of modules' attributes that are not told, among them `INTERNAL`.
        most: parts of objects that are looked at; what has more is never told to be what it was.

    Attributes:
        values: that were met and are no plain ones; they keep their addresses until all is told.
        objects: references to those that are told by which they are, or these themselves where they have none and refer
            to nothing.
        at_once: whether tuples and lists of plain values stand for themselves.
        whole: whether modules are told by all that they hold, and tensors by where they lie.
        untold: whether there is something of which nobody can tell whether it stays as it is.
    """

    cdef readonly list values, objects
    cdef public bint at_once, whole
    cdef readonly bint untold
    cdef object _left_out
    # Addresses of values, and which of them lie there: a table of open addresses.
    cdef size_t* _addresses
    cdef Py_ssize_t* _places
    cdef size_t _room
    cdef Py_ssize_t _left
    # What was said of the objects so far, one behind another: the type, the number of parts and these.
    cdef list _said
    cdef Py_ssize_t _done

    def __init__(self, left_out, Py_ssize_t most):
        self._left_out, self._left = left_out, most
        self.values, self.objects, self._said, self._done = [], [], [], 0
        self.at_once, self.whole, self.untold = True, False, False

    def __dealloc__(self):
        free(self._addresses)
        free(self._places)

    cdef int _make_room(self) except -1:
        """Have four places for each value."""
        cdef size_t* addresses
        cdef Py_ssize_t* places
        cdef Py_ssize_t i
        cdef size_t room = max(1 << 10, 8 * self._room), at
        addresses, places = <size_t*>calloc(room, sizeof(size_t)), <Py_ssize_t*>calloc(room, sizeof(Py_ssize_t))
        if addresses == NULL or places == NULL:
            free(addresses)
            free(places)
            raise MemoryError(f"values: expected memory for {room} of them, got none")
        free(self._addresses)
        free(self._places)
        self._addresses, self._places, self._room = addresses, places, room
        for i in range(len(self.values)):
            at = self._place_of(PyList_GET_ITEM(self.values, i))
            addresses[at], places[at] = <size_t>PyList_GET_ITEM(self.values, i), i
        return 0

    cdef inline size_t _place_of(self, PyObject* value):
        """Where a value stands in the table, or could."""
        cdef size_t at = ((<size_t>value >> 4) * 0x9E3779B97F4A7C15u >> 20) & (self._room - 1)
        while self._addresses[at] != 0 and self._addresses[at] != <size_t>value:
            at = (at + 1) & (self._room - 1)
        return at

    def tell(self, value):
        """What is written down in a value's place."""
        return self._tell(value)

    cdef object _tell(self, object value):
        if _is_plain(value):
            return value
        if 4 * <size_t>len(self.values) >= self._room:
            self._make_room()
        cdef size_t at = self._place_of(<PyObject*>value)
        if self._addresses[at] != 0:
            return _number(self._places[at])
        if self.at_once and (type(value) is tuple or type(value) is list) and _are_plain(value):
            return (type(value), *value)
        self._addresses[at], self._places[at] = <size_t><PyObject*>value, len(self.values)
        self.values.append(value)
        return _number(self._places[at])

    def rest(self):
        """What there is to say of each object so far, and of those that they refer to: its type and its parts."""
        self._tell_rest()
        cdef list found = []
        cdef Py_ssize_t at = 0, size
        while at < len(self._said):
            size = self._said[at + 1]
            found.append((self._said[at], self._said[at + 2 : at + 2 + size]))
            at += 2 + size
        return found

    cdef int _tell_rest(self) except -1:
        cdef object value, parts, which
        cdef list said = self._said
        cdef Py_ssize_t at
        while self._done < len(self.values):
            value = <object>PyList_GET_ITEM(self.values, self._done)
            self._done += 1
            said.append(self._tell(type(value)))
            at = len(said)
            said.append(0)
            if self.whole and PyObject_TypeCheck(value, <TypeStruct*>MODULE):
                self._tell_module(value)
            elif self.whole and PyObject_TypeCheck(value, <TypeStruct*>TENSOR):
                self._tell_tensor(value)
            elif type(value) is dict:
                if self._spend(1 + 2 * len(<dict>value)):
                    self._tell_table(value)
            elif type(value) is list or type(value) is tuple or type(value) is set or type(value) is frozenset:
                if self._spend(1 + len(value)):
                    for part in value:
                        said.append(self._tell(part))
            else:
                parts, which = self.parts(value)
                if which and not self._refer(value):
                    parts = gc.get_referents(value)
                for part in parts:
                    said.append(self._tell(part))
            said[at] = len(said) - at - 1
        return 0

    def refer(self, value):
        """Tell an object by which it is; whether that can be."""
        return self._refer(value)

    cdef bint _refer(self, object value) except -1:
        try:
            self.objects.append(reference_to(value))
        except TypeError:
            if gc.is_tracked(value):
                return False
            self.objects.append(value)
        return True

    def spend(self, Py_ssize_t parts):
        """Whether so many more parts are looked at."""
        return self._spend(parts)

    cdef bint _spend(self, Py_ssize_t parts) except -1:
        self._left -= parts
        if self._left <= 0:
            self.give_up()
        return self._left > 0

    def give_up(self):
        """Let what is told be equal to nothing else."""
        if not self.untold:
            self.untold = True
            self.objects.append(object())

    def parts(self, value):
        """What an object is told by: parts of it, and whether also by which one it is."""
        raise NotImplementedError

    def hooks(self, module):
        """What is told of a module's hooks, where it has some."""
        raise NotImplementedError

    def attributes(self, list modules, dict moved, is_weight, shown):
        """What is told of modules: of each its class, the classes of its parameters, its own attributes in turns with their
        names, and buffers that may be settings.

        Args:
            modules: told by these alone.
            moved: names that are left out, by the addresses of modules.
            is_weight: whether a buffer is none that tells something by its value.
            shown: what stands for a module's tensor that is none of its buffers: a plain value, or the tensor itself.
        """
        cdef PyObject* key
        cdef PyObject* value
        cdef Py_ssize_t place, at
        cdef object module, names
        cdef dict own, table
        cdef list told = []
        for module in modules:
            own, place, at = module.__dict__, 0, 0
            told.append(self._tell(type(module)))
            names = moved.get(id(module), ()) if moved else ()
            while PyDict_Next(own, &place, &key, &value):
                if _is_internal(key, &at, self._left_out) or (names and <object>key in names):
                    continue
                told.append(self._tell(<object>key))
                if PyObject_TypeCheck(<object>value, <TypeStruct*>TENSOR):
                    told.append(self._tell(shown(module, <object>value)))
                else:
                    told.append(self._tell(<object>value))
            table, place = own["_parameters"], 0
            while PyDict_Next(table, &place, &key, &value):
                told.append(self._tell(type(<object>value)))
            table, place = own["_buffers"], 0
            while PyDict_Next(table, &place, &key, &value):
                if <object>value is not None and <object>key not in names and not is_weight(<object>value):
                    told += ..., <object>key, self._tell(<object>value)
        return told

    cdef int _tell_module(self, object module) except -1:
        cdef PyObject* key
        cdef PyObject* value
        cdef Py_ssize_t place = 0, at = 0
        cdef dict own = module.__dict__
        if own["_forward_hooks"] or own["_forward_pre_hooks"]:
            self._said.extend([self._tell(part) for part in self.hooks(module)])
        for table in ("_modules", "_parameters", "_buffers"):
            # One that is written into another may not look like it.
            self._said.append(...)
            self._tell_table(<dict?>own[table])
        self._said.append(...)
        while PyDict_Next(own, &place, &key, &value):
            if not _is_internal(key, &at, self._left_out):
                self._said.append(self._tell(<object>key))
                self._said.append(self._tell(<object>value))
        return 0

    cdef int _tell_table(self, dict table) except -1:
        """Names and values in turns."""
        cdef PyObject* key
        cdef PyObject* value
        cdef Py_ssize_t place = 0
        while PyDict_Next(table, &place, &key, &value):
            self._said.append(self._tell(<object>key))
            self._said.append(self._tell(<object>value))
        return 0

    cdef int _tell_tensor(self, object tensor) except -1:
        """Which it is, and where it lies, as far as its kind says: those that are sparse, or not there yet, do not.
        Quantised ones have others inside."""
        cdef object shape
        self._refer(tensor)
        self._said.append(<size_t><PyObject*>tensor)
        try:
            shape = tensor.shape
            # The value of one without dimensions went with the launch.
            value = repr(tensor.item()) if not shape and tensor.is_cpu else None
            # The device is that of the memory, which is referred to.
            self._said += tensor.data_ptr(), hash((shape, tensor.stride(), tensor.dtype)), value
        except Exception:  # whatever its kind raises
            pass
        return self._tell_table(tensor.__dict__)


cdef class Told:
    """What was told of values: equal as long as plain ones are equal and the others the same.

    Args:
        walk: that told them.
        values: what stands for them, or lists of that.
    """

    cdef list _said, _objects

    def __init__(self, ObjectWalk walk, *values):
        walk._tell_rest()
        self._objects = walk.objects
        self._said = [*walk._said]
        for value in values:
            if type(value) is list:
                self._said.append(len(value))
                self._said.extend(value)
            else:
                self._said.append(value)

    def __hash__(self):
        return _hash_of(self._said)

    def __eq__(self, other):
        if type(other) is not Told:
            return False
        cdef Told told = other
        cdef Py_ssize_t i
        if len(self._objects) != len(told._objects):
            return False
        # A reference is the only one to its object, also once that has ended.
        for i in range(len(self._objects)):
            if PyList_GET_ITEM(self._objects, i) != PyList_GET_ITEM(told._objects, i):
                return False
        return _are_same(self._said, told._said)


cdef Py_hash_t _hash_of(object values) except -1:
    cdef size_t mixed = 1469598103934665603u
    cdef object value
    for value in values:
        mixed = (mixed ^ <size_t>_hash_of_one(value)) * 1099511628211u
    return -2 if <Py_hash_t>mixed == -1 else <Py_hash_t>mixed


cdef inline Py_hash_t _hash_of_one(object value) except? -1:
    if type(value) is tuple:
        return (<tuple>value)[1] if (<tuple>value)[0] is ... else _hash_of(value)
    if type(value) is float or type(value) is complex:
        # Numbers that are none have the hashes of the objects that they are.
        return hash(value) if value == value else 0
    return hash(value)


cdef bint _are_same(object some, object others) except -1:
    """Whether what was told is the same: two tuples, or two lists."""
    cdef Py_ssize_t i
    cdef object one, other
    if len(some) != len(others):
        return False
    for i in range(len(some)):
        one, other = some[i], others[i]
        if one is other:
            continue
        if type(one) is not type(other):
            return False
        if type(one) is tuple:
            if not _are_same(one, other):
                return False
        elif type(one) is float or type(one) is complex:
            # Zeros have signs, and what is no number equals itself here.
            if repr(one) != repr(other):
                return False
        elif one != other:
            return False
    return True


cdef bint _are_plain(object values):
    for value in values:
        if not _is_plain(value):
            return False
    return True


def reference_to(value):
    """A weak reference, of a tensor that to its memory.

    PyTorch refuses to exchange what tensors stand for, as `module.to` does with quantised ones, while anything refers to
    them weakly.

    Raises:
        TypeError: nothing can refer to it weakly.
    """
    if PyObject_TypeCheck(value, <TypeStruct*>TENSOR):
        try:
            return weakref.ref(value.untyped_storage())
        except Exception:  # whatever its kind raises, as sparse ones do
            pass
    return weakref.ref(value)
