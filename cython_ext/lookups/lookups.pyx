"""What names led to and what objects held, compared later, by identity and within microseconds."""

from array import array
from itertools import chain

from cpython.dict cimport PyDict_GetItem, PyDict_Next, PyDict_Size
from cpython.object cimport PyObject

cdef extern from "Python.h":
    ctypedef struct TypeStruct "PyTypeObject":
        unsigned int tp_version_tag

    PyObject* PyList_GET_ITEM(list, Py_ssize_t)

cdef object ABSENT = object()
cdef tuple PLAIN = (bool, int, float, str)


cdef object _original(object value):
    """What an exchanged function stands for, as its attribute `stands_for` says; others themselves."""
    return getattr(value, "stands_for", value)


cdef inline bint _same(object one, object other) except -1:
    """Whether two values are one object, or equal plain values of one type."""
    return one is other or (type(one) is type(other) and type(one) in PLAIN and one == other)


cdef class Lookups:
    """What names lead to: keys of dictionaries and other mappings, and attributes of classes.

    A function that stands for another within a scope, and says so by its attribute `stands_for`, counts as the other.
    """

    # Each space's names that were looked up there, and what they led to; CPython's number of what a class and its bases
    # were like then, 0 where there is none.
    cdef list _spaces, _names, _found
    cdef list _tags
    cdef dict _places

    def __init__(self):
        self._spaces, self._names, self._found, self._tags, self._places = [], [], [], [], {}

    def __len__(self):
        return sum(map(len, self._names))

    def add(self, space, str name):
        """Note what a name leads to now, and return it; None where it leads nowhere.

        Args:
            space: the mapping whose key, or the class whose attribute it is.
        """
        cdef object found = _look(space, name)
        cdef object place = self._places.get(id(space))
        if place is None:
            place = self._places[id(space)] = len(self._spaces)
            for held, new in ((self._spaces, space), (self._names, []), (self._found, []), (self._tags, 0)):
                held.append(new)
        self._names[place].append(name)
        self._found[place].append(found)
        # What was noted before may have changed since.
        self._tags[place] = 0
        return None if found is ABSENT else found

    def items(self):
        """Names, and what they led to when they were noted; those that led nowhere left out."""
        pairs = zip(chain(*self._names), chain(*self._found))
        return [(name, found) for name, found in pairs if found is not ABSENT]

    def changed(self):
        """The first name that leads elsewhere now; None where all lead where they led. About 10 ns for each key, and for
        each class."""
        cdef Py_ssize_t i
        cdef unsigned int tag
        cdef object changed, space
        for i in range(len(self._spaces)):
            space = self._spaces[i]
            if not isinstance(space, type):
                changed = _changed(space, self._names[i], self._found[i])
            else:
                tag = (<TypeStruct*>space).tp_version_tag
                if tag != 0 and tag == <unsigned int>self._tags[i]:
                    continue
                changed = _changed(space, self._names[i], self._found[i])
                # Looking up has given the class a number.
                self._tags[i] = (<TypeStruct*>space).tp_version_tag
            if changed is not None:
                self._tags[i] = 0
                return changed
        return None


cdef object _look(object space, str name):
    """What a name leads to."""
    cdef object found
    if isinstance(space, type):
        found = getattr(space, name, ABSENT)
    else:
        found = space.get(name, ABSENT)
    return found if found is ABSENT else _original(found)


cdef object _changed(object space, list names, list found):
    """The first name that leads elsewhere in one space; None where there is none."""
    cdef Py_ssize_t i
    for i in range(len(names)):
        if type(space) is dict:
            if PyDict_GetItem(space, names[i]) == <PyObject*>found[i]:
                continue
        if _look(space, names[i]) is not found[i]:
            return names[i]
    return None


cdef bint _lies_somewhere(object tensor):
    try:
        return tensor.data_ptr() != 0
    except Exception:  # whatever its kind raises, as sparse ones do and those that are not there yet
        return False


cdef class Snapshot:
    """What objects are, what they, dictionaries and lists hold, where tensors lie and how often they were written to, at
    one moment.

    Entries are compared by identity, numbers and strings by value; what an entry's own attributes are is not looked at.

    Args:
        owners, dicts, lists, tensors: to look at. Writes that PyTorch does not count, as those into tensors of inference
            mode, are not seen.
    """

    cdef list _owners, _dicts, _lists, _counted, _placed
    cdef list _kinds, _held, _versions, _places
    cdef Py_ssize_t[::1] _sizes

    def __init__(self, list owners, list dicts, list lists, list tensors):
        self._owners, self._dicts, self._lists = owners, [*map(vars, owners), *dicts], lists
        self._counted = [tensor for tensor in tensors if not tensor.is_inference()]
        self._placed = [tensor for tensor in tensors if _lies_somewhere(tensor)]
        self._take()

    def take(self):
        """Look at everything anew. About 10 ns for each container and entry."""
        if not self.is_same():
            self._take()

    cdef int _take(self) except -1:
        cdef PyObject* key
        cdef PyObject* value
        cdef Py_ssize_t place
        cdef list held = []
        for one in self._dicts:
            place = 0
            while PyDict_Next(one, &place, &key, &value):
                held.append(<object>key)
                held.append(<object>value)
        for other in self._lists:
            held.extend(other)
        self._kinds, self._held = [*map(type, self._owners)], held
        # Sizes of dictionaries and lists, and one number so that there are some.
        self._sizes = array("q", [*map(len, self._dicts), *map(len, self._lists), 0])
        self._versions = [tensor._version for tensor in self._counted]
        self._places = [tensor.data_ptr() for tensor in self._placed]
        return 0

    def is_same(self):
        """Whether everything is as it was when it was last looked at."""
        cdef PyObject* key
        cdef PyObject* value
        cdef PyObject* one
        cdef Py_ssize_t place, size, at = 0, i, dicts = len(self._dicts)
        cdef list held = self._held
        for i in range(len(self._owners)):
            if type(<object>PyList_GET_ITEM(self._owners, i)) is not self._kinds[i]:
                return False
        for i in range(dicts):
            one = PyList_GET_ITEM(self._dicts, i)
            size = PyDict_Size(<object>one)
            if size != self._sizes[i]:
                return False
            # Most are empty: the hooks of each module.
            if size == 0:
                continue
            place = 0
            while PyDict_Next(<object>one, &place, &key, &value):
                if key != PyList_GET_ITEM(held, at):
                    return False
                if value != PyList_GET_ITEM(held, at + 1) and not _same(<object>value, held[at + 1]):
                    return False
                at += 2
        for i in range(len(self._lists)):
            if len(self._lists[i]) != self._sizes[dicts + i]:
                return False
            for entry in self._lists[i]:
                if not _same(entry, held[at]):
                    return False
                at += 1
        for i in range(len(self._counted)):
            if self._counted[i]._version != self._versions[i]:
                return False
        for i in range(len(self._placed)):
            if self._placed[i].data_ptr() != self._places[i]:
                return False
        return True
