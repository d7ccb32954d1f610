// An engine file, mapped and checked. After `open` succeeds, every offset, shape and operand in it can be trusted.
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

  // An error when the file's bytes have gone since it was opened: what was read from it is worth nothing.
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

  // Of the largest layer; of the layer that `write` writes, whose blocks are as far apart.
  CacheShape cache_shape() const;
  CacheShape cache_shape(const OpRecord& write) const;
  const OpRecord* cache_write(uint32_t layer) const;  // null: there is none

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
  Mapping tables_;                       // a copy: what was checked stays so, whatever is written into the file
  const std::byte* metadata_ = nullptr;  // of the mapping, until there is the copy
};

// Float32 numbers that an operation keeps of a sequence.
uint64_t state_floats(const OpRecord& op);

// Of a tensor in the file, with what fills up its panels.
uint64_t tensor_bytes(const TensorRecord& tensor);

}  // namespace llmserve
