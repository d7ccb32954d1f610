// Errors inside the library are values: a kind that the C API returns, and a text for the user. Empty text: success.
#pragma once

#include <string>
#include <utility>

namespace llmserve {

enum class Status : int { kOk = 0, kInvalid = 1, kBadFile = 2, kOutOfMemory = 3, kInternal = 4 };

struct Error {
  Status status = Status::kOk;
  std::string text;

  explicit operator bool() const { return status != Status::kOk; }
};

inline Error bad_file(std::string text) { return {Status::kBadFile, std::move(text)}; }
inline Error invalid(std::string text) { return {Status::kInvalid, std::move(text)}; }
inline Error out_of_memory(std::string text) { return {Status::kOutOfMemory, std::move(text)}; }

}  // namespace llmserve
