/* A map from (number, text) to a number. One holds the names that exist: the number of the directory and the name in
 * it give the node. Open addressing with linear probing. The text is not copied: whoever adds it keeps it until it is
 * removed, and gets it back then.
 */
#include "_channel.h"

#include <stdlib.h>
#include <string.h>

#define LEAST_SLOTS 1024u

struct name_slot {
    uint64_t number;
    const char *text; /* NULL marks a free slot */
    uint32_t length, value;
};

static uint64_t mix(uint64_t value) {
    value = (value ^ (value >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    value = (value ^ (value >> 27)) * UINT64_C(0x94d049bb133111eb);
    return value ^ (value >> 31);
}

uint64_t name_hash(uint64_t number, const char *text, size_t length) {
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < length; i++)
        hash = (hash ^ (unsigned char)text[i]) * UINT64_C(0x100000001b3);
    return mix(hash ^ mix(number + UINT64_C(0x9e3779b97f4a7c15)));
}

static uint64_t home_of(const struct names *names, const struct name_slot *slot) {
    return name_hash(slot->number, slot->text, slot->length) & (names->slot_count - 1);
}

/* The slot that holds it, or the free one where it would be put. The map has slots. */
static struct name_slot *find(const struct names *names, uint64_t number, const char *text, size_t length) {
    uint64_t mask = names->slot_count - 1, place = name_hash(number, text, length) & mask;
    for (;; place = (place + 1) & mask) {
        struct name_slot *slot = &names->slots[place];
        if (!slot->text ||
            (slot->number == number && slot->length == length && memcmp(slot->text, text, length) == 0))
            return slot;
    }
}

static bool grow(struct names *names) {
    struct names larger = {.slot_count = names->slot_count ? names->slot_count * 2 : LEAST_SLOTS, .used = names->used};
    larger.slots = calloc(larger.slot_count, sizeof *larger.slots);
    if (!larger.slots)
        return false;
    for (uint64_t i = 0; i < names->slot_count; i++) {
        const struct name_slot *slot = &names->slots[i];
        if (slot->text)
            *find(&larger, slot->number, slot->text, slot->length) = *slot;
    }
    free(names->slots);
    *names = larger;
    return true;
}

bool names_put(struct names *names, uint64_t number, const char *text, size_t length, uint32_t value, const char **old) {
    *old = NULL;
    if ((names->used + 1) * 3 > names->slot_count * 2 && !grow(names))
        return false;
    struct name_slot *slot = find(names, number, text, length);
    names->used += !slot->text;
    *old = slot->text;
    *slot = (struct name_slot){number, text, (uint32_t)length, value};
    return true;
}

bool names_get(const struct names *names, uint64_t number, const char *text, size_t length, uint32_t *value) {
    if (!names->slot_count)
        return false;
    const struct name_slot *slot = find(names, number, text, length);
    if (!slot->text)
        return false;
    *value = slot->value;
    return true;
}

const char *names_remove(struct names *names, uint64_t number, const char *text, size_t length) {
    if (!names->slot_count)
        return NULL;
    struct name_slot *found = find(names, number, text, length);
    const char *removed = found->text;
    if (!removed)
        return NULL;
    /* Close the gap: whatever was pushed past it by the probing moves back. */
    uint64_t mask = names->slot_count - 1, hole = (uint64_t)(found - names->slots);
    for (uint64_t next = (hole + 1) & mask; names->slots[next].text; next = (next + 1) & mask) {
        if (((next - home_of(names, &names->slots[next])) & mask) >= ((next - hole) & mask)) {
            names->slots[hole] = names->slots[next];
            hole = next;
        }
    }
    names->slots[hole].text = NULL;
    names->used--;
    return removed;
}

void names_clear(struct names *names, void (*release)(const char *text)) {
    for (uint64_t i = 0; release && i < names->slot_count; i++)
        if (names->slots[i].text)
            release(names->slots[i].text);
    free(names->slots);
    *names = (struct names){0};
}
