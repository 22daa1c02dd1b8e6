//! Limits of policies: fuel, memory, staged effects, output, and supervision.

use std::time::Duration;

use statehouse_precompiled::CompileBounds;

/// Default fuel of one call (`max_fuel`): about a thousand times what a SET uses. Enough for a page
/// of SCAN, and at most some ten milliseconds of a runaway loop.
pub const FUEL_PER_CALL_DEFAULT: u64 = 4_000_000;

/// Lower limit of `max_fuel`: some sixteen SETs. With much less, even the built-in policy could not
/// answer.
pub const FUEL_PER_CALL_MIN: u64 = 50_000;

/// What one SCAN of the built-in policy uses at most (2.9 million in the worst measured cases). A
/// start warns if `max_fuel` is lower.
pub const FUEL_PER_SCAN_MAX: u64 = 3_000_000;

/// Upper limit of `max_fuel`: some hundred milliseconds of a runaway loop, during which every
/// request waits, and a fifth of what the watchdog allows. A re-execution always has this much,
/// because the original may have run under any limit.
pub const FUEL_PER_CALL_MAX: u64 = 40_000_000;

/// Additional fuel for every payload byte, since a parser must look at each. The worst payload
/// (only empty strings, six bytes each) uses about a quarter of it.
pub const FUEL_PER_PAYLOAD_BYTE: u64 = 64;

/// Fuel of an import, in addition to the charge for bytes and keys. A host call takes some hundred
/// nanoseconds, as long as this many instructions at the 2.5 ns each that the default fuel assumes.
pub const FUEL_PER_IMPORT: u64 = 128;

/// Fuel of each byte of a key that is passed to an import. The host hashes the key, and compares it
/// with up to a few hundred keys of the same request.
pub const FUEL_PER_KEY_BYTE: u64 = 1;

/// Bytes copied between guest and host for one unit of fuel. Copying a megabyte takes some hundred
/// microseconds, and the default fuel allows sixteen.
pub const MOVED_BYTES_PER_FUEL: u64 = 4;

/// Fuel of each key of a page, each pattern of a client's rights and each 32 bytes of user
/// properties that the host examines. A SCAN of 32 pages uses a million in the worst case.
pub const FUEL_PER_EXAMINED_KEY: u64 = 16;

/// Fuel of `describe` and `configure`: interpreters start up there.
pub const FUEL_SETUP: u64 = 2_000_000_000;

/// The watchdog's tick. Fuel is the actual limit, because it does not depend on the machine's load,
/// so the tick is coarse enough to cost an idle gateway nothing.
pub const EPOCH_TICK: Duration = Duration::from_millis(20);

/// Ticks until the watchdog stops a call: longer than any honest call on a slow, loaded machine,
/// and short enough that other clients notice only a short delay.
pub const EPOCH_TICKS_PER_CALL: u64 = 25;

/// The same as a duration.
pub const WATCHDOG: Duration = EPOCH_TICK.saturating_mul(EPOCH_TICKS_PER_CALL as u32);

/// Linear memory of a policy. The request and its response are copied into it; everything else is
/// small. It also bounds `max_packet_bytes`.
pub const GUEST_MEMORY_BYTES_MAX: usize = 32 << 20;

/// Elements of a policy's tables (its function pointers).
pub const GUEST_TABLE_ELEMENTS_MAX: usize = 20_000;

/// Core instances of one component: three for a Rust guest, 13 with QuickJS, 38 with CPython, whose
/// standard library consists of shared objects.
pub const GUEST_INSTANCES_MAX: usize = 64;

/// Memories of one component: QuickJS has three, of which two are empty, and the standard policy
/// that a rule is composed with has one. The byte limit applies to their sum.
pub const GUEST_MEMORIES_MAX: usize = 4;

/// Tables of one component: one for its function pointers and one of wit-component; QuickJS has one
/// more. Those of a composed rule are added to two of the standard policy.
pub const GUEST_TABLES_MAX: usize = 6;

/// Native stack of a policy call. Unbounded recursion stops here and not in the host's guard page.
pub const GUEST_STACK_BYTES_MAX: usize = 256 << 10;

pub use statehouse_precompiled::POLICY_FILE_BYTES_MAX;

/// Limits of the process that compiles a policy. Of the policies of `examples/set-point`, the Rust
/// one takes 15 MB, the one with QuickJS (1.6 MB) 95 MB and the one with CPython (18 MB) 350 MB and
/// ten seconds. A malicious file of half a megabyte takes a gigabyte. The CPU time is twelve times
/// that of CPython. The wall time is longer, because requests have priority. Machine code is about
/// three times as long as the policy.
pub const COMPILE: CompileBounds = CompileBounds {
    memory_bytes: 256 << 20,
    memory_per_file_byte: 32,
    memory_bytes_max: 1 << 30,
    cpu: Duration::from_secs(120),
    wall: Duration::from_secs(300),
    threads_max: 4,
    code_bytes_max: 192 << 20,
};

/// Policies that are loaded at once. Each costs the memory of its machine code: some hundred
/// kilobytes, or some ten megabytes with an interpreter.
pub const LOADED_POLICIES_MAX: usize = 16;

/// Previous policies that a rollback can return to.
pub const PREVIOUS_POLICIES_MAX: usize = 4;

/// Files of a drop directory that an assignment records: as many as the directory may have. Above
/// this, the oldest that a newer content of the same file has replaced is dropped, or else the
/// oldest that the directory no longer has.
pub const DELIVERED_FILES_MAX: usize = 64;

/// Decisions of the guard that an assignment records. Above this, the oldest is dropped.
pub const GUARD_DECISIONS_MAX: usize = 16;

/// Policies that are retained only because a request that they handled may be redelivered.
pub const RETIRED_POLICIES_MAX: usize = 16;

/// Policy files on disk. Beyond this, files that are not in use are removed, the oldest first. A
/// replay of history can use them while they exist.
pub const MODULE_BYTES_MAX: u64 = 256 << 20;

/// Files of machine code: one for each loaded policy, and one for each policy retained for
/// redeliveries.
pub const CODE_FILES_MAX: usize = LOADED_POLICIES_MAX + RETIRED_POLICIES_MAX;

/// All files of machine code. Machine code is about three times as long as the policy. Beyond this,
/// the files that no start has used for longest are removed, and a start that needs one compiles it
/// again.
pub const CODE_BYTES_MAX: u64 = 256 << 20;

/// Routes: each request is compared with all of them.
pub const ROUTES_MAX: usize = 64;

/// The prefix of a route.
pub const ROUTE_PREFIX_BYTES_MAX: usize = 1024;

/// A pattern of client ids or keys. A comparison costs at most its length times that of a key.
pub const CANARY_PATTERN_BYTES_MAX: usize = 256;

/// Requests in the window of the guard.
pub const GUARD_WINDOW_REQUESTS: usize = 1000;

/// Default limit of failed requests in the window (`guard_failures`): a broken policy reaches it at
/// once. Of cheap failures, one client contributes at most half while the policy answers other
/// clients well. A failure that used the fuel of a whole call counts in full, because every client
/// waits for it.
pub const GUARD_FAILURES_DEFAULT: u32 = 10;

/// Requests in the window that the watchdog may stop before the policy is rolled back: they delay
/// all clients by five seconds. The calls of an honest policy take a tenth of a second together.
/// They would be stopped this often only if their thread got a fiftieth of a core.
pub const GUARD_WATCHDOG_MAX: u32 = 10;

/// Requests in the window before their mean fuel is checked.
pub const GUARD_FUEL_REQUESTS_MIN: usize = 100;

/// By default, one of this many requests of the active policy is re-executed on a fresh instance
/// (`purity_sample`): a thousandth of its time.
pub const PURITY_SAMPLE_DEFAULT: u32 = 1024;

/// At higher request rates, the rate of re-execution stays constant. A fresh instance takes a tenth
/// of a millisecond, and dropping it interrupts the threads that handle requests.
pub const PURITY_REQUESTS_PER_SECOND_MAX: u64 = 50_000;

/// Sampled requests that may wait for re-execution. A sample that finds the queue full is dropped.
pub const SAMPLE_QUEUE_MAX: usize = 1024;

/// All waiting samples, in bytes: at most a sixteenth of the memory.
pub const SAMPLE_QUEUE_BYTES_MAX: u64 = 32 << 20;

/// What a sample costs apart from its payload, properties, reads and writes, rounded up.
pub const SAMPLE_OVERHEAD_BYTES: u64 = 1024;

/// Additional keys that a candidate in shadow may read, beyond those that the request read.
pub const SAMPLE_MISSING_READS_MAX: usize = 64;

/// How often a candidate is executed for one request: each run may ask for more keys.
pub const SAMPLE_ROUNDS_MAX: u32 = 4;

/// Removed keys that the store remembers, as hashes, while a candidate is in shadow. An absent key
/// among them may have been present when the request ran.
pub const RECENT_REMOVALS_MAX: usize = 4096;

/// Examples of differences in a report.
pub const SHADOW_EXAMPLES_MAX: usize = 32;

/// Examples with the same kind of difference at the same command.
pub const SHADOW_EXAMPLES_ALIKE_MAX: usize = 4;

/// Bytes of a request or an answer in an example. The rest is cut.
pub const SHADOW_EXAMPLE_BYTES_MAX: usize = 512;

/// Writes of one request in an example.
pub const SHADOW_EXAMPLE_WRITES_MAX: usize = 8;

/// Interval at which the caller of an assignment checks whether it is durable.
pub const ASSIGNED_POLL: Duration = Duration::from_micros(200);

/// Bytes of a client id, user or file name in the origin of a policy. The record of an assignment
/// has at most two origins of each loaded policy.
pub const ORIGIN_NAME_BYTES_MAX: usize = 128;

/// Swaps of the active policy that are listed: 64 KiB at most.
pub const SWAPS_LISTED_MAX: usize = 256;

/// How often a change of the assignment is attempted if others interfere.
pub const ASSIGN_ATTEMPTS_MAX: u32 = 8;

/// A policy selector: a name, a version and the separator.
pub const SELECTOR_BYTES_MAX: usize = 2 * POLICY_NAME_BYTES_MAX + 1;

/// The fewest hex digits of a digest that select a policy.
pub const DIGEST_DIGITS_MIN: usize = 6;

/// Writes that one request may stage: policies with hidden bookkeeping need a few.
pub const STAGED_WRITES_MAX: usize = 64;

/// Bytes of the staged writes: twice the longest values. The request and its answer are half as
/// large each, so their record stays well below the limit of the write-ahead log.
pub const STAGED_BYTES_MAX: u64 = 32 << 20;

/// Changes of watches that one request may stage.
pub const STAGED_WATCHES_MAX: usize = 64;

/// Head of a response or notification: it contains a whole page of SCAN.
pub const REPLY_HEAD_BYTES_MAX: usize = 1 << 20;

/// Name and version in a policy's description: they are part of every log line.
pub const POLICY_NAME_BYTES_MAX: usize = 64;

/// Commands in a policy's description: each has a metric.
pub const POLICY_COMMANDS_MAX: usize = 64;

/// Keys of one page.
pub const PAGE_KEYS_MAX: u32 = 1024;

/// Bytes of the keys of one page, apart from the first key: a guest must hold them at once.
pub const PAGE_BYTES_MAX: usize = 64 << 10;

/// Keys examined for one page. Unreadable and expired keys are skipped, and a page may be empty.
/// The 32 pages of a SCAN are within the fuel of one call, including the instructions of the
/// standard policy.
pub const PAGE_KEYS_EXAMINED_MAX: usize = 2048;

/// Bytes of the keys examined for one page. A pattern may examine each byte of a key, so long keys
/// take as much time as many keys. Enough for [`PAGE_KEYS_EXAMINED_MAX`] keys of ordinary length.
pub const PAGE_BYTES_EXAMINED_MAX: usize = 512 << 10;

/// Bytes that a policy may draw at once from the seeded generator.
pub const RANDOM_BYTES_MAX: u32 = 1024;

/// Bytes of a policy's log line. The rest is cut.
pub const GUEST_LOG_BYTES_MAX: usize = 1024;

/// Log lines of policies that the store keeps for readers: half a megabyte at most. A reader that
/// asks every second misses none as long as the policies write fewer per second.
pub const GUEST_LOG_LINES_KEPT_MAX: usize = 512;

/// Log lines by and about a policy in one second. Further lines are only counted.
pub const GUEST_LOG_LINES_PER_SECOND_MAX: u32 = 20;

/// Distinct counters of a policy. Further ones are counted as `other`.
pub const GUEST_COUNTERS_MAX: usize = 256;

/// Distinct errors that a policy answers with. Its texts may contain words of clients, so further
/// ones are counted as `other`.
pub const GUEST_ERRORS_MAX: usize = 32;

/// Bytes of such a text: those of the standard policy have at most 40.
pub const GUEST_ERROR_BYTES_MAX: usize = 96;
