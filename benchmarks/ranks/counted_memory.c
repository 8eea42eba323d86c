/* Counts what torch's CPU allocator holds, from whatever thread it takes or frees it.

   Torch takes all its CPU memory by posix_memalign (c10/core/impl/alloc_cpu.cpp, in libc10); what
   others take in the same way, as oneDNN does, is left out. Torch's profiler does not see what gloo's
   threads free, so this is loaded before everything else, by LD_PRELOAD. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define NUM_SLOTS (1 << 20)
#define GONE ((void *)1)

static struct {
  void *block;
  size_t num_bytes;
} slots[NUM_SLOTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long current_bytes, peak_bytes;
static int (*take)(void **, size_t, size_t);
static void (*give)(void *);

static size_t slot_of(void *block) {
  uintptr_t key = (uintptr_t)block;
  key ^= key >> 17;
  return (key * 0x9E3779B97F4A7C15ull >> 20) & (NUM_SLOTS - 1);
}

static int is_of_torch(void *caller) {
  Dl_info place;
  return dladdr(caller, &place) && place.dli_fname && strstr(place.dli_fname, "libc10.so");
}

int posix_memalign(void **out, size_t alignment, size_t num_bytes) {
  if (!take) take = dlsym(RTLD_NEXT, "posix_memalign");
  int failed = take(out, alignment, num_bytes);
  if (failed || !is_of_torch(__builtin_return_address(0))) return failed;
  pthread_mutex_lock(&lock);
  size_t slot = slot_of(*out);
  while (slots[slot].block && slots[slot].block != GONE) slot = (slot + 1) & (NUM_SLOTS - 1);
  slots[slot].block = *out;
  slots[slot].num_bytes = num_bytes;
  current_bytes += num_bytes;
  if (current_bytes > peak_bytes) peak_bytes = current_bytes;
  pthread_mutex_unlock(&lock);
  return 0;
}

void free(void *block) {
  if (!give) give = dlsym(RTLD_NEXT, "free");
  if (block && !((uintptr_t)block & 63)) {
    pthread_mutex_lock(&lock);
    for (size_t slot = slot_of(block); slots[slot].block; slot = (slot + 1) & (NUM_SLOTS - 1)) {
      if (slots[slot].block == block) {
        current_bytes -= slots[slot].num_bytes;
        slots[slot].block = GONE;
        break;
      }
    }
    pthread_mutex_unlock(&lock);
  }
  give(block);
}

long counted_bytes(void) { return current_bytes; }

long counted_peak_bytes(void) { return peak_bytes; }

void begin_counting(void) {
  pthread_mutex_lock(&lock);
  peak_bytes = current_bytes;
  pthread_mutex_unlock(&lock);
}
