/* Looking at the files of a directory, many in one call: what stat(2) tells of each, and one of its attributes.
 *
 * A walk over an SSD tier looks at every file there is, each with five system calls. From Python those are a third of
 * its time; here the interpreter is free meanwhile, for the loop that serves the mount. Whatever is not as it is with
 * nearly all files (more attributes, a large one, any error) is left to the caller.
 */
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>

#include <fcntl.h>
#include <stdbool.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#define MOST_FILES 64
#define LARGEST_VALUE 256
#define LARGEST_NAMES 512

struct look {
    bool is_plain;
    struct stat status;
    ssize_t length;
    char value[LARGEST_VALUE];
};

/* Whether a file has the attribute, and no other one that begins with the same prefix: all up to its last dot. */
static bool has_alone(int fd, const char *attribute) {
    char names[LARGEST_NAMES];
    ssize_t length = flistxattr(fd, names, sizeof names);
    size_t prefix = (size_t)(strrchr(attribute, '.') - attribute) + 1;
    bool found = false;
    for (ssize_t place = 0; place < length; place += (ssize_t)strlen(names + place) + 1) {
        if (strcmp(names + place, attribute) == 0)
            found = true;
        else if (strncmp(names + place, attribute, prefix) == 0)
            return false;
    }
    return found;
}

static void look_at_one(int directory, const char *name, int flags, const char *attribute, struct look *look) {
    look->is_plain = false;
    int fd = openat(directory, name, flags);
    if (fd < 0)
        return;
    if (fstat(fd, &look->status) == 0 && has_alone(fd, attribute)) {
        look->length = fgetxattr(fd, attribute, look->value, sizeof look->value);
        look->is_plain = look->length >= 0;
    }
    close(fd);
}

static long long nanoseconds(struct timespec time) { return time.tv_sec * 1000000000LL + time.tv_nsec; }

static PyObject *as_tuple(const struct look *look) {
    const struct stat *status = &look->status;
    return Py_BuildValue("(IKKKLLLLy#)", (unsigned)status->st_mode, (unsigned long long)status->st_dev,
                         (unsigned long long)status->st_ino, (unsigned long long)status->st_nlink,
                         (long long)status->st_size, (long long)status->st_blocks, nanoseconds(status->st_mtim),
                         nanoseconds(status->st_atim), look->value, (Py_ssize_t)look->length);
}

static PyObject *look_at(PyObject *module, PyObject *arguments) {
    (void)module;
    int directory, flags;
    PyObject *names;
    const char *attribute;
    if (!PyArg_ParseTuple(arguments, "iO!is", &directory, &PyTuple_Type, &names, &flags, &attribute))
        return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(names);
    if (count > MOST_FILES || !strchr(attribute, '.')) {
        PyErr_Format(PyExc_ValueError, "at most %d files, and an attribute with a prefix", MOST_FILES);
        return NULL;
    }
    const char *texts[MOST_FILES];
    for (Py_ssize_t place = 0; place < count; place++)
        if (!(texts[place] = PyBytes_AsString(PyTuple_GET_ITEM(names, place))))
            return NULL;
    struct look looks[MOST_FILES];
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t place = 0; place < count; place++)
        look_at_one(directory, texts[place], flags, attribute, &looks[place]);
    Py_END_ALLOW_THREADS
    PyObject *found = PyList_New(count);
    for (Py_ssize_t place = 0; found && place < count; place++) {
        PyObject *one = looks[place].is_plain ? as_tuple(&looks[place]) : Py_NewRef(Py_None);
        if (!one)
            Py_CLEAR(found);
        else
            PyList_SET_ITEM(found, place, one);
    }
    return found;
}

static PyMethodDef methods[] = {
    {"look_at", look_at, METH_VARARGS,
     "look_at(dir_fd, names, flags, attribute): for each of up to 64 files its mode, device, inode, links, size, "
     "blocks, times of modification and access in nanoseconds, and attribute; None for whatever is not plain."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_looking",
    .m_size = 0,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__looking(void) { return PyModuleDef_Init(&definition); }
