/* Functions from here to TARGET_END are compiled for the instruction sets that TARGET names. */
#define PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define TARGET_BEGIN(names) PRAGMA(clang attribute push(__attribute__((target(names))), apply_to = function))
#define TARGET_END _Pragma("clang attribute pop")
#else
#define TARGET_BEGIN(names) PRAGMA(GCC target(names))
#define TARGET_END
#endif
TARGET_BEGIN(TARGET)
