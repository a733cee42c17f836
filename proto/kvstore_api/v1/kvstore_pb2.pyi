from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TierName(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_HBM: _ClassVar[TierName]
    TIER_DRAM: _ClassVar[TierName]
    TIER_NVME: _ClassVar[TierName]

class Durability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DURABILITY_DRAM: _ClassVar[Durability]
    DURABILITY_NVME: _ClassVar[Durability]
    DURABILITY_SYNCED: _ClassVar[Durability]
TIER_HBM: TierName
TIER_DRAM: TierName
TIER_NVME: TierName
DURABILITY_DRAM: Durability
DURABILITY_NVME: Durability
DURABILITY_SYNCED: Durability

class MatchRequest(_message.Message):
    __slots__ = ("keyspace_id", "hashes")
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    keyspace_id: bytes
    hashes: bytes
    def __init__(self, keyspace_id: _Optional[bytes] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class MatchReply(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("keyspace_id", "after_sequence")
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    keyspace_id: bytes
    after_sequence: int
    def __init__(self, keyspace_id: _Optional[bytes] = ..., after_sequence: _Optional[int] = ...) -> None: ...

class IndexEvent(_message.Message):
    __slots__ = ("sequence", "kind", "keyspace_id", "hashes", "tier", "time_ns", "session_id", "detail", "parents")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        SNAPSHOT: _ClassVar[IndexEvent.Kind]
        STORED: _ClassVar[IndexEvent.Kind]
        REMOVED: _ClassVar[IndexEvent.Kind]
        SNAPSHOT_END: _ClassVar[IndexEvent.Kind]
        SESSION: _ClassVar[IndexEvent.Kind]
    SNAPSHOT: IndexEvent.Kind
    STORED: IndexEvent.Kind
    REMOVED: IndexEvent.Kind
    SNAPSHOT_END: IndexEvent.Kind
    SESSION: IndexEvent.Kind
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    TIME_NS_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    kind: IndexEvent.Kind
    keyspace_id: bytes
    hashes: bytes
    tier: TierName
    time_ns: int
    session_id: str
    detail: str
    parents: bytes
    def __init__(self, sequence: _Optional[int] = ..., kind: _Optional[_Union[IndexEvent.Kind, str]] = ..., keyspace_id: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., tier: _Optional[_Union[TierName, str]] = ..., time_ns: _Optional[int] = ..., session_id: _Optional[str] = ..., detail: _Optional[str] = ..., parents: _Optional[bytes] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("keyspace_id", "hashes", "session_id")
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    keyspace_id: bytes
    hashes: bytes
    session_id: str
    def __init__(self, keyspace_id: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., session_id: _Optional[str] = ...) -> None: ...

class ExplainReply(_message.Message):
    __slots__ = ("num_blocks", "num_requested", "reason", "session")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    num_requested: int
    reason: str
    session: str
    def __init__(self, num_blocks: _Optional[int] = ..., num_requested: _Optional[int] = ..., reason: _Optional[str] = ..., session: _Optional[str] = ...) -> None: ...

class RouteRequest(_message.Message):
    __slots__ = ("keyspace_id", "hashes")
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    keyspace_id: bytes
    hashes: bytes
    def __init__(self, keyspace_id: _Optional[bytes] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class RouteReply(_message.Message):
    __slots__ = ("nodes",)
    class Node(_message.Message):
        __slots__ = ("address", "num_blocks", "load")
        ADDRESS_FIELD_NUMBER: _ClassVar[int]
        NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
        LOAD_FIELD_NUMBER: _ClassVar[int]
        address: str
        num_blocks: int
        load: float
        def __init__(self, address: _Optional[str] = ..., num_blocks: _Optional[int] = ..., load: _Optional[float] = ...) -> None: ...
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[RouteReply.Node]
    def __init__(self, nodes: _Optional[_Iterable[_Union[RouteReply.Node, _Mapping]]] = ...) -> None: ...

class RegisterKeyspaceRequest(_message.Message):
    __slots__ = ("encoding",)
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    encoding: bytes
    def __init__(self, encoding: _Optional[bytes] = ...) -> None: ...

class RegisterKeyspaceReply(_message.Message):
    __slots__ = ("keyspace_id", "slot_bytes", "boot_epoch")
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    keyspace_id: bytes
    slot_bytes: int
    boot_epoch: int
    def __init__(self, keyspace_id: _Optional[bytes] = ..., slot_bytes: _Optional[int] = ..., boot_epoch: _Optional[int] = ...) -> None: ...

class PoolReport(_message.Message):
    __slots__ = ("tier", "capacity_bytes", "used_bytes", "hit_tokens", "computed_tokens", "restored_tokens_dram", "restored_tokens_nvme")
    TIER_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESTORED_TOKENS_DRAM_FIELD_NUMBER: _ClassVar[int]
    RESTORED_TOKENS_NVME_FIELD_NUMBER: _ClassVar[int]
    tier: TierName
    capacity_bytes: int
    used_bytes: int
    hit_tokens: int
    computed_tokens: int
    restored_tokens_dram: int
    restored_tokens_nvme: int
    def __init__(self, tier: _Optional[_Union[TierName, str]] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., restored_tokens_dram: _Optional[int] = ..., restored_tokens_nvme: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("client_id", "pool")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    pool: PoolReport
    def __init__(self, client_id: _Optional[str] = ..., pool: _Optional[_Union[PoolReport, _Mapping]] = ...) -> None: ...

class ServiceState(_message.Message):
    __slots__ = ("boot_epoch", "lease_ttl_ms", "health")
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    boot_epoch: int
    lease_ttl_ms: int
    health: str
    def __init__(self, boot_epoch: _Optional[int] = ..., lease_ttl_ms: _Optional[int] = ..., health: _Optional[str] = ...) -> None: ...

class AcquireRequest(_message.Message):
    __slots__ = ("keyspace_id", "hashes", "session_id", "client_id", "ttl_ms")
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    keyspace_id: bytes
    hashes: bytes
    session_id: str
    client_id: str
    ttl_ms: int
    def __init__(self, keyspace_id: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., session_id: _Optional[str] = ..., client_id: _Optional[str] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class AcquireReply(_message.Message):
    __slots__ = ("lease_id", "num_blocks", "ttl_ms", "boot_epoch")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    num_blocks: int
    ttl_ms: int
    boot_epoch: int
    def __init__(self, lease_id: _Optional[int] = ..., num_blocks: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., boot_epoch: _Optional[int] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("lease_ids", "boot_epoch")
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    boot_epoch: int
    def __init__(self, lease_ids: _Optional[_Iterable[int]] = ..., boot_epoch: _Optional[int] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("expired",)
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    expired: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, expired: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_ids", "boot_epoch")
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    boot_epoch: int
    def __init__(self, lease_ids: _Optional[_Iterable[int]] = ..., boot_epoch: _Optional[int] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("lease_id", "boot_epoch", "first", "last")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    boot_epoch: int
    first: int
    last: int
    def __init__(self, lease_id: _Optional[int] = ..., boot_epoch: _Optional[int] = ..., first: _Optional[int] = ..., last: _Optional[int] = ...) -> None: ...

class RestoreReply(_message.Message):
    __slots__ = ("op_id", "first", "tiers", "slots", "records")
    OP_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    op_id: int
    first: int
    tiers: bytes
    slots: bytes
    records: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, op_id: _Optional[int] = ..., first: _Optional[int] = ..., tiers: _Optional[bytes] = ..., slots: _Optional[bytes] = ..., records: _Optional[_Iterable[bytes]] = ...) -> None: ...

class RestoreDoneRequest(_message.Message):
    __slots__ = ("op_id", "boot_epoch", "corrupt", "bytes_dram", "bytes_nvme")
    OP_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    BYTES_DRAM_FIELD_NUMBER: _ClassVar[int]
    BYTES_NVME_FIELD_NUMBER: _ClassVar[int]
    op_id: int
    boot_epoch: int
    corrupt: _containers.RepeatedScalarFieldContainer[int]
    bytes_dram: int
    bytes_nvme: int
    def __init__(self, op_id: _Optional[int] = ..., boot_epoch: _Optional[int] = ..., corrupt: _Optional[_Iterable[int]] = ..., bytes_dram: _Optional[int] = ..., bytes_nvme: _Optional[int] = ...) -> None: ...

class RestoreDoneReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("keyspace_id", "hashes", "first", "session_id", "client_id", "ttl_ms", "wait_ms")
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    keyspace_id: bytes
    hashes: bytes
    first: int
    session_id: str
    client_id: str
    ttl_ms: int
    wait_ms: int
    def __init__(self, keyspace_id: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., first: _Optional[int] = ..., session_id: _Optional[str] = ..., client_id: _Optional[str] = ..., ttl_ms: _Optional[int] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ("op_id", "statuses", "slots", "boot_epoch")
    class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        GRANTED: _ClassVar[ReserveReply.Status]
        RESIDENT: _ClassVar[ReserveReply.Status]
        IN_FLIGHT: _ClassVar[ReserveReply.Status]
        FULL: _ClassVar[ReserveReply.Status]
        NO_PARENT: _ClassVar[ReserveReply.Status]
    GRANTED: ReserveReply.Status
    RESIDENT: ReserveReply.Status
    IN_FLIGHT: ReserveReply.Status
    FULL: ReserveReply.Status
    NO_PARENT: ReserveReply.Status
    OP_ID_FIELD_NUMBER: _ClassVar[int]
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    op_id: int
    statuses: bytes
    slots: bytes
    boot_epoch: int
    def __init__(self, op_id: _Optional[int] = ..., statuses: _Optional[bytes] = ..., slots: _Optional[bytes] = ..., boot_epoch: _Optional[int] = ...) -> None: ...

class SealRequest(_message.Message):
    __slots__ = ("op_id", "boot_epoch", "records", "failed", "durability", "keyspace_id", "hashes", "wait_ms")
    OP_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    op_id: int
    boot_epoch: int
    records: _containers.RepeatedScalarFieldContainer[bytes]
    failed: bytes
    durability: Durability
    keyspace_id: bytes
    hashes: bytes
    wait_ms: int
    def __init__(self, op_id: _Optional[int] = ..., boot_epoch: _Optional[int] = ..., records: _Optional[_Iterable[bytes]] = ..., failed: _Optional[bytes] = ..., durability: _Optional[_Union[Durability, str]] = ..., keyspace_id: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class SealReply(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("session_id", "deadline_ms")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    deadline_ms: int
    def __init__(self, session_id: _Optional[str] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class PrefetchReply(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("session_id", "keyspace_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    keyspace_id: bytes
    def __init__(self, session_id: _Optional[str] = ..., keyspace_id: _Optional[bytes] = ...) -> None: ...

class SessionInfo(_message.Message):
    __slots__ = ("session_id", "activity", "tool", "num_blocks", "num_blocks_dram", "num_blocks_nvme", "seconds_in_state", "parent_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    TOOL_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_DRAM_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_NVME_FIELD_NUMBER: _ClassVar[int]
    SECONDS_IN_STATE_FIELD_NUMBER: _ClassVar[int]
    PARENT_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    activity: str
    tool: str
    num_blocks: int
    num_blocks_dram: int
    num_blocks_nvme: int
    seconds_in_state: float
    parent_id: str
    def __init__(self, session_id: _Optional[str] = ..., activity: _Optional[str] = ..., tool: _Optional[str] = ..., num_blocks: _Optional[int] = ..., num_blocks_dram: _Optional[int] = ..., num_blocks_nvme: _Optional[int] = ..., seconds_in_state: _Optional[float] = ..., parent_id: _Optional[str] = ...) -> None: ...

class SignalRequest(_message.Message):
    __slots__ = ("session_id", "kind", "tool", "expected_s", "output_tokens")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        TURN_START: _ClassVar[SignalRequest.Kind]
        TOOL_START: _ClassVar[SignalRequest.Kind]
        TOOL_END: _ClassVar[SignalRequest.Kind]
        TURN_END: _ClassVar[SignalRequest.Kind]
        STOPPED: _ClassVar[SignalRequest.Kind]
    TURN_START: SignalRequest.Kind
    TOOL_START: SignalRequest.Kind
    TOOL_END: SignalRequest.Kind
    TURN_END: SignalRequest.Kind
    STOPPED: SignalRequest.Kind
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TOOL_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_S_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    kind: SignalRequest.Kind
    tool: str
    expected_s: float
    output_tokens: int
    def __init__(self, session_id: _Optional[str] = ..., kind: _Optional[_Union[SignalRequest.Kind, str]] = ..., tool: _Optional[str] = ..., expected_s: _Optional[float] = ..., output_tokens: _Optional[int] = ...) -> None: ...

class SignalReply(_message.Message):
    __slots__ = ("hint", "predicted_s")
    class Hint(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NONE: _ClassVar[SignalReply.Hint]
        ACCEPTED: _ClassVar[SignalReply.Hint]
        CLIPPED: _ClassVar[SignalReply.Hint]
        REFUSED: _ClassVar[SignalReply.Hint]
    NONE: SignalReply.Hint
    ACCEPTED: SignalReply.Hint
    CLIPPED: SignalReply.Hint
    REFUSED: SignalReply.Hint
    HINT_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_S_FIELD_NUMBER: _ClassVar[int]
    hint: SignalReply.Hint
    predicted_s: float
    def __init__(self, hint: _Optional[_Union[SignalReply.Hint, str]] = ..., predicted_s: _Optional[float] = ...) -> None: ...

class ForkRequest(_message.Message):
    __slots__ = ("parent_id", "session_id")
    PARENT_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    parent_id: str
    session_id: str
    def __init__(self, parent_id: _Optional[str] = ..., session_id: _Optional[str] = ...) -> None: ...

class SupersedeRequest(_message.Message):
    __slots__ = ("session_id", "keyspace_id", "hashes")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    keyspace_id: bytes
    hashes: bytes
    def __init__(self, session_id: _Optional[str] = ..., keyspace_id: _Optional[bytes] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class EndRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class EndReply(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("activity",)
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    activity: str
    def __init__(self, activity: _Optional[str] = ...) -> None: ...

class ListReply(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionInfo]
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionInfo, _Mapping]]] = ...) -> None: ...

class ExportRequest(_message.Message):
    __slots__ = ("session_id", "name")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    name: str
    def __init__(self, session_id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("name", "session_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    session_id: str
    def __init__(self, name: _Optional[str] = ..., session_id: _Optional[str] = ...) -> None: ...

class NamedContext(_message.Message):
    __slots__ = ("name", "keyspace_id", "hashes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEYSPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    name: str
    keyspace_id: bytes
    hashes: bytes
    def __init__(self, name: _Optional[str] = ..., keyspace_id: _Optional[bytes] = ..., hashes: _Optional[bytes] = ...) -> None: ...
