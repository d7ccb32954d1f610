// A mapped and checked engine file. After `open` succeeds, every offset, shape and operand in it is valid.
#pragma once

#include <span>
#include <string>

#include "error.h"
#include "file_guard.h"
#include "format.h"
#include "kv_cache.h"
#include "memory.h"

namespace llmserve {

class EngineFile {
 public:
  Error open(const std::string& path);

  // Returns an error if bytes of the file were lost since it was opened; results computed from it are then invalid.
  Error check_whole() const;

  const FileHeader& header() const { return *reinterpret_cast<const FileHeader*>(metadata_); }
  std::span<const OpRecord> ops() const { return table<OpRecord>(header().ops_offset, header().num_ops); }
  std::span<const TensorRecord> tensors() const {
    return table<TensorRecord>(header().tensors_offset, header().num_tensors);
  }
  std::span<const BufferRecord> buffers() const {
    return table<BufferRecord>(header().buffers_offset, header().num_buffers);
  }

  const TensorRecord& record(int32_t index) const { return tensors()[static_cast<size_t>(index)]; }

  // The shape of the largest layer, and that of the layer that `write` writes, with the same distance between blocks.
  CacheShape cache_shape() const;
  CacheShape cache_shape(const OpRecord& write) const;
  const OpRecord* cache_write(uint32_t layer) const;  // null: the layer has none

  // The data of tensor `index`; null for kNoTensor.
  template <class T>
  const T* tensor(int32_t index) const {
    if (index == kNoTensor) return nullptr;
    return reinterpret_cast<const T*>(mapping_.data() + tensors()[static_cast<size_t>(index)].offset);
  }

 private:
  template <class T>
  std::span<const T> table(uint64_t offset, uint32_t count) const {
    return {reinterpret_cast<const T*>(metadata_ + offset), count};
  }

  Error check_header() const;
  Error check_tensors() const;

  Mapping mapping_;
  FileGuard guard_;
  Mapping tables_;                       // a copy, so that writes to the file cannot change what was checked
  const std::byte* metadata_ = nullptr;  // in the mapping, until the copy exists
};

// Number of f32 elements in an operation's state of one sequence.
uint64_t state_floats(const OpRecord& op);

// Bytes of a tensor in the file, including the padding of its panels.
uint64_t tensor_bytes(const TensorRecord& tensor);

}  // namespace llmserve
