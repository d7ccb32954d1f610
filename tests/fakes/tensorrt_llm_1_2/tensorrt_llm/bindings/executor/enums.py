"""Enumerations of the bindings."""

import enum


class ModelType(enum.Enum):
    DECODER_ONLY = 0
    ENCODER_ONLY = 1
    ENCODER_DECODER = 2


class CapacitySchedulerPolicy(enum.Enum):
    MAX_UTILIZATION = 0
    GUARANTEED_NO_EVICT = 1
    STATIC_BATCH = 2


class ContextChunkingPolicy(enum.Enum):
    FIRST_COME_FIRST_SERVED = 0
    EQUAL_PROGRESS = 1


class CommunicationType(enum.Enum):
    MPI = 0


class CommunicationMode(enum.Enum):
    LEADER = 0
    ORCHESTRATOR = 1


class BatchingType(enum.Enum):
    STATIC = 0
    INFLIGHT = 1


class RequestType(enum.Enum):
    REQUEST_TYPE_CONTEXT_AND_GENERATION = 0


class FinishReason(enum.Enum):
    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5
