#include "engine_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "program_check.h"

namespace llmserve {
namespace {

// CRC-32 as in zlib, so that Python's standard library can write it.
uint32_t crc32(const std::byte* data, size_t count) {
  static constexpr auto kTable = [] {
    std::array<uint32_t, 256> table{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t value = i;
      for (int bit = 0; bit < 8; ++bit) value = (value & 1) ? (value >> 1) ^ 0xedb88320u : value >> 1;
      table[i] = value;
    }
    return table;
  }();
  uint32_t crc = ~0u;
  for (size_t i = 0; i < count; ++i) crc = kTable[(crc ^ static_cast<uint32_t>(data[i])) & 0xff] ^ (crc >> 8);
  return ~crc;
}

class Descriptor {
 public:
  explicit Descriptor(const char* path) : value_(::open(path, O_RDONLY | O_CLOEXEC)) {}
  ~Descriptor() {
    if (value_ >= 0) ::close(value_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int value() const { return value_; }

 private:
  int value_;
};

// Whether [offset, offset + bytes) lies in [begin, end) and is aligned.
bool fits(uint64_t offset, uint64_t bytes, uint64_t begin, uint64_t end, uint64_t alignment) {
  return offset % alignment == 0 && offset >= begin && offset <= end && bytes <= end - offset;
}

bool in_range(uint32_t value, uint32_t low, uint32_t high) { return value >= low && value <= high; }

}  // namespace

uint64_t state_floats(const OpRecord& op) {
  if (op.kind == static_cast<uint32_t>(OpKind::kConvolution)) return uint64_t{op.out.width} * (op.window - 1);
  const bool has_matrices = op.kind == static_cast<uint32_t>(OpKind::kDeltaRule) || op.kind == static_cast<uint32_t>(OpKind::kSelectiveScan);
  if (has_matrices) return uint64_t{op.out.width} * op.head_dim;
  return 0;
}

CacheShape EngineFile::cache_shape() const {
  const FileHeader& h = header();
  return {static_cast<DType>(h.cache_dtype), h.block_size, h.num_kv_heads, h.head_dim};
}

CacheShape EngineFile::cache_shape(const OpRecord& write) const {
  CacheShape shape = cache_shape();
  shape.stride = shape.block_bytes();
  if (write.head_dim != 0) shape.head_dim = write.head_dim;
  shape.num_kv_heads = write.in[0].width / shape.head_dim;
  return shape;
}

const OpRecord* EngineFile::cache_write(uint32_t layer) const {
  for (const OpRecord& op : ops()) {
    if (op.kind == static_cast<uint32_t>(OpKind::kCacheWrite) && op.layer == layer) return &op;
  }
  return nullptr;
}

uint64_t tensor_bytes(const TensorRecord& tensor) {
  uint64_t rows = tensor.rows, cols = tensor.cols;
  if (tensor.layout == static_cast<uint32_t>(Layout::kPanels)) {
    rows = (rows + kPanelColumns - 1) / kPanelColumns * kPanelColumns;
    const auto type = static_cast<DType>(tensor.dtype);
    if (type >= DType::kI8) cols = (cols + 3) / 4 * 4;
    if (type > DType::kI8) return rows * cols * code_bits(type) / 8;
  }
  return rows * cols * dtype_bytes(static_cast<DType>(tensor.dtype));
}

Error EngineFile::open(const std::string& path) {
  const Descriptor file(path.c_str());
  if (file.value() < 0) return bad_file(std::string("cannot be opened: ") + std::strerror(errno));
  struct stat status = {};
  if (fstat(file.value(), &status) != 0 || !S_ISREG(status.st_mode)) return bad_file("is not a regular file");
  const auto bytes = static_cast<uint64_t>(status.st_size);
  if (bytes < sizeof(FileHeader)) return bad_file("is too short to be an engine");
  mapping_ = Mapping::of_file(file.value(), bytes);
  if (!mapping_.data()) return out_of_memory(std::string("cannot be mapped: ") + std::strerror(errno));
  guard_.watch(mapping_);
  metadata_ = mapping_.data();
  if (Error error = check_header()) return error;
  tables_ = Mapping::anonymous(header().metadata_bytes);
  if (!tables_.data()) return out_of_memory("has tables for which there is no memory");
  std::memcpy(tables_.data(), mapping_.data(), tables_.size());
  metadata_ = tables_.data();
  if (Error error = check_whole()) return error;
  if (Error error = check_tensors()) return error;
  return check_program(*this);
}

Error EngineFile::check_whole() const {
  if (!guard_.lost()) return {};
  return bad_file("was truncated, or cannot be read any more, while it was in use; put a whole copy in its place with a "
                  "rename, and load the model again");
}

Error EngineFile::check_header() const {
  const FileHeader& h = header();
  if (std::memcmp(h.magic, kMagic, sizeof(kMagic)) != 0) return bad_file("is not an engine file");
  if (h.version < kFormatVersion) {
    return bad_file("has format version " + std::to_string(h.version) +
                    ": built by an older llmserve; rebuild with: llmserve build CHECKPOINT");
  }
  if (h.version > kFormatVersion) {
    return bad_file("has format version " + std::to_string(h.version) + ", this build reads " +
                    std::to_string(kFormatVersion) + "; update llmserve, or build the engine again");
  }
  if (h.file_bytes != mapping_.size()) {
    return bad_file("should have " + std::to_string(h.file_bytes) + " bytes and has " +
                    std::to_string(mapping_.size()) + ": truncated or damaged");
  }
  if (h.metadata_bytes < sizeof(FileHeader) || h.metadata_bytes > h.file_bytes ||
      crc32(mapping_.data() + 16, h.metadata_bytes - 16) != h.metadata_crc) {
    return bad_file("has a damaged header (checksum)");
  }
  const auto holds = [&](uint64_t offset, uint64_t count, uint64_t size) {
    return fits(offset, count * size, sizeof(FileHeader), h.metadata_bytes, size == 1 ? 1 : 8);
  };
  if (!holds(h.ops_offset, h.num_ops, sizeof(OpRecord)) ||
      !holds(h.tensors_offset, h.num_tensors, sizeof(TensorRecord)) ||
      !holds(h.buffers_offset, h.num_buffers, sizeof(BufferRecord)) || !holds(h.json_offset, h.json_bytes, 1)) {
    return bad_file("has a table outside of the file");
  }
  if (h.packing != kPanelPacking) return bad_file("has a weight packing that this build does not know");
  constexpr uint32_t kMost = 1u << 24;
  if (!in_range(h.num_ops, 1, kMost) || !in_range(h.num_buffers, 1, 4096) || !in_range(h.vocab_size, 1, kMost) ||
      !in_range(h.max_num_tokens, 1, kMost) ||
      !in_range(h.max_batch_size, 1, kMost) || !in_range(h.max_seq_len, 1, kMost) ||
      !in_range(h.block_size, 1, 1u << 16) || !in_range(h.num_layers, 1, 1u << 16) ||
      !in_range(h.num_kv_heads, 1, 1u << 12) || !in_range(h.head_dim, 1, kMaxHeadDim) ||
      h.experts_per_token > kMaxExperts || uint64_t{h.max_num_tokens} * h.experts_per_token > INT32_MAX ||
      h.cache_dtype > static_cast<uint32_t>(DType::kI8)) {
    return bad_file("has a limit that makes no sense");
  }
  if (h.mixes_heads != (h.cache_dtype == static_cast<uint32_t>(DType::kI8))) {
    return bad_file("rounds keys in a form that this build does not have; rebuild with: llmserve build CHECKPOINT");
  }
  return {};
}

Error EngineFile::check_tensors() const {
  const FileHeader& h = header();
  for (size_t i = 0; i < h.num_tensors; ++i) {
    const TensorRecord& t = tensors()[i];
    const bool known = t.dtype <= static_cast<uint32_t>(DType::kI3) && t.layout <= static_cast<uint32_t>(Layout::kPanels);
    const uint64_t elements = uint64_t{t.rows} * t.cols;
    if (!known || elements == 0 || elements > h.file_bytes ||
        !fits(t.offset, tensor_bytes(t), h.metadata_bytes, h.file_bytes, kPageBytes)) {
      return bad_file("has a damaged record of tensor " + std::to_string(i));
    }
  }
  for (const BufferRecord& buffer : buffers()) {
    if (buffer.bytes_per_row == 0 || buffer.bytes_per_row > 1u << 26 || buffer.bytes_per_row % 64 != 0) {
      return bad_file("has a damaged buffer record");
    }
  }
  return {};
}

}  // namespace llmserve
