# The source package of ik-llama-cpp-python 0.1.5 lacks the script that says which commit was compiled.
set(script ${CMAKE_SOURCE_DIR}/vendor/ik_llama.cpp/common/cmake/build-info-gen-cpp.cmake)
if(NOT EXISTS ${script})
  file(WRITE ${script} "set(BUILD_NUMBER 0)\nconfigure_file(common/build-info.cpp.in common/build-info.cpp)\n")
endif()
