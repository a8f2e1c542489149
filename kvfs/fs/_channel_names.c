/* Multisets of 64-bit fingerprints of (number, name). One holds the names that exist, each with the number of its
 * directory: a look-up of a name that is certainly not there is answered without Python. Open addressing with linear probing; a multiset, so that two names with
 * one fingerprint are two members and removing one leaves the other.
 */
#include "_channel.h"

#include <stdlib.h>

#define LEAST_SLOTS 1024u

static uint64_t mix(uint64_t value) {
    value = (value ^ (value >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    value = (value ^ (value >> 27)) * UINT64_C(0x94d049bb133111eb);
    return value ^ (value >> 31);
}

static uint64_t fingerprint(uint64_t parent, const char *name, size_t length) {
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < length; i++)
        hash = (hash ^ (unsigned char)name[i]) * UINT64_C(0x100000001b3);
    hash = mix(hash ^ mix(parent + UINT64_C(0x9e3779b97f4a7c15)));
    return hash ? hash : 1; /* 0 marks a free slot */
}

static void put(uint64_t *slots, uint64_t count, uint64_t value) {
    uint64_t place = value & (count - 1);
    while (slots[place])
        place = (place + 1) & (count - 1);
    slots[place] = value;
}

static bool grow(struct names *names) {
    uint64_t count = names->slot_count ? names->slot_count * 2 : LEAST_SLOTS;
    uint64_t *slots = calloc(count, sizeof *slots);
    if (!slots)
        return false;
    for (uint64_t i = 0; i < names->slot_count; i++)
        if (names->slots[i])
            put(slots, count, names->slots[i]);
    free(names->slots);
    names->slots = slots;
    names->slot_count = count;
    return true;
}

bool names_add(struct names *names, uint64_t parent, const char *name, size_t length) {
    if ((names->used + 1) * 3 > names->slot_count * 2 && !grow(names))
        return false;
    put(names->slots, names->slot_count, fingerprint(parent, name, length));
    names->used++;
    return true;
}

void names_remove(struct names *names, uint64_t parent, const char *name, size_t length) {
    if (!names->slot_count)
        return;
    uint64_t mask = names->slot_count - 1, value = fingerprint(parent, name, length), hole = value & mask;
    while (names->slots[hole] != value) {
        if (!names->slots[hole])
            return;
        hole = (hole + 1) & mask;
    }
    /* Close the gap: whatever was pushed past it by the probing moves back. */
    for (uint64_t next = (hole + 1) & mask; names->slots[next]; next = (next + 1) & mask) {
        uint64_t home = names->slots[next] & mask;
        if (((next - home) & mask) >= ((next - hole) & mask)) {
            names->slots[hole] = names->slots[next];
            hole = next;
        }
    }
    names->slots[hole] = 0;
    names->used--;
}

bool names_has(const struct names *names, uint64_t parent, const char *name, size_t length) {
    if (!names->slot_count)
        return false;
    uint64_t mask = names->slot_count - 1, value = fingerprint(parent, name, length);
    for (uint64_t place = value & mask; names->slots[place]; place = (place + 1) & mask)
        if (names->slots[place] == value)
            return true;
    return false;
}
