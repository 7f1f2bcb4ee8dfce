"""What names led to and what objects held, compared later, by identity and within microseconds."""

from cpython.dict cimport PyDict_GetItem, PyDict_Next, PyDict_Size
from cpython.object cimport PyObject

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

    cdef list _spaces, _names, _found

    def __init__(self):
        self._spaces, self._names, self._found = [], [], []

    def __len__(self):
        return len(self._names)

    def add(self, space, str name):
        """Note what a name leads to now, and return it; None where it leads nowhere.

        Args:
            space: the mapping whose key, or the class whose attribute it is.
        """
        cdef object found = self._look(space, name)
        self._spaces.append(space)
        self._names.append(name)
        self._found.append(found)
        return None if found is ABSENT else found

    def items(self):
        """Names, and what they led to when they were noted; those that led nowhere left out."""
        return [(name, found) for name, found in zip(self._names, self._found) if found is not ABSENT]

    cdef object _look(self, object space, str name):
        cdef object found
        if isinstance(space, type):
            found = getattr(space, name, ABSENT)
        else:
            found = space.get(name, ABSENT)
        return found if found is ABSENT else _original(found)

    def changed(self):
        """The first name that leads elsewhere now; None where all lead where they led. About 10 ns for each."""
        cdef Py_ssize_t i
        cdef PyObject* found
        cdef object space
        for i in range(len(self._names)):
            space = self._spaces[i]
            if type(space) is dict:
                found = PyDict_GetItem(space, self._names[i])
                if found == <PyObject*>self._found[i]:
                    continue
            if self._look(space, self._names[i]) is not self._found[i]:
                return self._names[i]
        return None


cdef class Snapshot:
    """What dictionaries and lists hold, and how often tensors were written to, at one moment.

    Entries are compared by identity, numbers and strings by value; what an entry's own attributes are is not looked at.

    Args:
        dicts, lists: to look at.
        tensors: whose writes PyTorch counts.
    """

    cdef list _dicts, _lists, _tensors
    cdef list _held, _sizes, _versions

    def __init__(self, list dicts, list lists, list tensors):
        self._dicts, self._lists, self._tensors = dicts, lists, tensors
        self.take()

    def take(self):
        """Look at everything anew. About 10 ns for each entry."""
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
        self._held = held
        self._sizes = [PyDict_Size(one) for one in self._dicts] + [len(other) for other in self._lists]
        self._versions = [tensor._version for tensor in self._tensors]

    def is_same(self):
        """Whether everything is as it was when it was last looked at."""
        cdef PyObject* key
        cdef PyObject* value
        cdef Py_ssize_t place, at = 0, i, dicts = len(self._dicts)
        cdef list held = self._held
        for i in range(dicts):
            if PyDict_Size(self._dicts[i]) != self._sizes[i]:
                return False
            place = 0
            while PyDict_Next(self._dicts[i], &place, &key, &value):
                if key != <PyObject*>held[at]:
                    return False
                if value != <PyObject*>held[at + 1] and not _same(<object>value, held[at + 1]):
                    return False
                at += 2
        for i in range(len(self._lists)):
            if len(self._lists[i]) != self._sizes[dicts + i]:
                return False
            for one in self._lists[i]:
                if not _same(one, held[at]):
                    return False
                at += 1
        for i in range(len(self._tensors)):
            if self._tensors[i]._version != self._versions[i]:
                return False
        return True
