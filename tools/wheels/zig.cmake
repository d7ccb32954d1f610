# Compiles for a glibc that is older than this machine's, or for another processor, with Zig's clang and its libc++, which
# becomes a part of the library: cmake -DCMAKE_TOOLCHAIN_FILE=... -DLLMSERVE_ZIG=/path/to/zig -DLLMSERVE_PROCESSOR=aarch64
# -DLLMSERVE_GLIBC=2.28
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES LLMSERVE_ZIG LLMSERVE_PROCESSOR LLMSERVE_GLIBC)
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR ${LLMSERVE_PROCESSOR})
set(CMAKE_CXX_COMPILER ${LLMSERVE_ZIG} c++ -target ${LLMSERVE_PROCESSOR}-linux-gnu.${LLMSERVE_GLIBC})
set(CMAKE_SHARED_LINKER_FLAGS_INIT -s)  # the strip of this machine knows no other machine's files
set(CMAKE_CXX_LINKER_DEPFILE_SUPPORTED FALSE)  # of Zig's linker
set(LLMSERVE_NEON_FLAGS -mcpu=generic+v8_2a+dotprod)  # Zig has other names for processors than GCC
