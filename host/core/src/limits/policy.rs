//! Bounds of policies that run: what they burn and hold, what they may stage and say, and how the host watches over them.

use std::time::Duration;

use statehouse_precompiled::CompileBounds;

/// Default bound of the fuel of one call (`max_fuel`), about a thousand times what a SET burns: room for a page of SCAN,
/// and at most some ten milliseconds of a runaway loop.
pub const FUEL_PER_CALL_DEFAULT: u64 = 4_000_000;

/// What `max_fuel` may be lowered to: some thirty SETs. Much below, even the built-in policy could answer nothing.
pub const FUEL_PER_CALL_MIN: u64 = 50_000;

/// What `max_fuel` may be raised to: at most some hundred milliseconds of a runaway loop, while everybody waits, and a fifth
/// of what the watchdog allows. What ran once has this much whenever it runs again, since it may have run under any bound.
pub const FUEL_PER_CALL_MAX: u64 = 40_000_000;

/// Fuel on top for every byte of the payload, since a parser must look at each: the worst payload
/// (nothing but empty strings, six bytes each) burns about a quarter of it.
pub const FUEL_PER_PAYLOAD_BYTE: u64 = 64;

/// Fuel of an import, in addition to the charge for bytes and keys: a call of the host takes some
/// hundred nanoseconds, as long as this many instructions at the 2.5 ns each that the default
/// budget assumes.
pub const FUEL_PER_IMPORT: u64 = 128;

/// Fuel of each byte of a key that an import is about: the host hashes it, and compares it with up to a
/// few hundred keys of the same request.
pub const FUEL_PER_KEY_BYTE: u64 = 1;

/// Bytes that go from the guest to the host or back for one unit of fuel. Copying a megabyte takes some
/// hundred microseconds, and the default budget buys sixteen.
pub const MOVED_BYTES_PER_FUEL: u64 = 4;

/// Fuel of each key of a page, each pattern of a client's rights and each 32 bytes of user properties
/// that the host examines. A SCAN of 32 pages burns a million in the worst case.
pub const FUEL_PER_LOOK: u64 = 16;

/// Fuel of `describe` and `configure`: interpreters start up there.
pub const FUEL_SETUP: u64 = 2_000_000_000;

/// The watchdog's tick. It is no verdict (fuel is, since it does not depend on the machine's load), so it
/// is coarse enough to cost an idle gateway nothing.
pub const EPOCH_TICK: Duration = Duration::from_millis(20);

/// Ticks until the watchdog stops a call: longer than any honest call on a slow, loaded machine,
/// short enough that other clients only notice a hiccup.
pub const EPOCH_TICKS_PER_CALL: u64 = 25;

/// How long that is.
pub const WATCHDOG: Duration = EPOCH_TICK.saturating_mul(EPOCH_TICKS_PER_CALL as u32);

/// Linear memory of a policy: the request and its reply lie in it, everything else is small. It also
/// bounds `max_packet_bytes`, since a payload is copied into it.
pub const GUEST_MEMORY_BYTES_MAX: usize = 32 << 20;

/// Elements of a policy's tables (its function pointers).
pub const GUEST_TABLE_ELEMENTS_MAX: usize = 20_000;

/// Core instances of one component: three where the guest is Rust, 13 with QuickJS, 38 with CPython, whose standard
/// library comes as shared objects.
pub const GUEST_INSTANCES_MAX: usize = 64;

/// Memories of one component: QuickJS comes with three, of which two are empty. The bound of bytes is that of all
/// together.
pub const GUEST_MEMORIES_MAX: usize = 3;

/// Tables of one component: one for its function pointers and one of wit-component's; QuickJS has one more.
pub const GUEST_TABLES_MAX: usize = 4;

/// Native stack of a policy call. A recursion without end stops here instead of in the host's guard page.
pub const GUEST_STACK_BYTES_MAX: usize = 256 << 10;

/// A policy file: Python policies with their interpreter are 18 MB.
pub const POLICY_FILE_BYTES_MAX: u64 = 64 << 20;

/// What compiling a policy may take, in a process of its own. Of the policies in `examples/set-point` the one in Rust takes
/// 15 MB, that with QuickJS (1.6 MB) 95 MB and that with CPython (18 MB) 350 MB and ten seconds; a file of half a megabyte that
/// is made to be costly takes a gigabyte. Time is twelve times that of CPython, and more by the clock, since requests come
/// first. Machine code is about three times as long as the policy.
pub const COMPILE: CompileBounds = CompileBounds {
    memory_bytes: 256 << 20,
    memory_per_file_byte: 32,
    memory_bytes_max: 1 << 30,
    cpu: Duration::from_secs(120),
    wall: Duration::from_secs(300),
    threads_max: 4,
    code_bytes_max: 192 << 20,
};

/// Policies that are held ready at once. Each costs the memory of its machine code, some hundred kilobytes or,
/// with an interpreter in it, some ten megabytes.
pub const LOADED_POLICIES_MAX: usize = 16;

/// Policies that a rollback can go back to.
pub const PREVIOUS_POLICIES_MAX: usize = 4;

/// Policies that are kept only because a request that they handled may come again.
pub const RETIRED_POLICIES_MAX: usize = 16;

/// Files of policies on disk. Beyond it those that nothing needs are removed, the oldest first; a replay of history can
/// use the others.
pub const MODULE_BYTES_MAX: u64 = 256 << 20;

/// Files of machine code: one for each policy that is held ready or that a request which may come again was handled by.
pub const CODE_FILES_MAX: usize = LOADED_POLICIES_MAX + RETIRED_POLICIES_MAX;

/// All of them together. Machine code is about three times as long as the policy. Beyond it those that no start used for
/// longest are removed, and a start that needs one compiles it again.
pub const CODE_BYTES_MAX: u64 = 256 << 20;

/// Prefixes with a policy of their own: each request is compared with all of them.
pub const ROUTES_MAX: usize = 64;

/// Such a prefix.
pub const ROUTE_PREFIX_BYTES_MAX: usize = 1024;

/// A pattern of client ids or keys. Comparing costs at most its length times that of a key.
pub const CANARY_PATTERN_BYTES_MAX: usize = 256;

/// Requests that the guard over a policy looks back on.
pub const GUARD_WINDOW_REQUESTS: usize = 1000;

/// Default bound of failed ones among them (`guard_failures`): a broken policy reaches it at once. Of the failures that cost
/// little, one client brings at most half while the policy answers other clients well. A failure that used up the fuel of a
/// call counts in full, since every client waits for it.
pub const GUARD_FAILURES_DEFAULT: u32 = 10;

/// Requests among them that the watchdog may stop, before that is the policy's fault: they hold everybody up for five
/// seconds. For an honest policy's calls, which take a tenth of a second together, to be hit so often, their thread would
/// have to get a fiftieth of a core.
pub const GUARD_WATCHDOG_MAX: u32 = 10;

/// Requests before their mean fuel says anything.
pub const GUARD_FUEL_REQUESTS_MIN: usize = 100;

/// Default of how many requests of the active policy go by for each that runs again on a fresh instance
/// (`purity_sample`): a thousandth of its time.
pub const PURITY_SAMPLE_DEFAULT: u32 = 1024;

/// Above so many requests per second no more of them run again: a fresh instance takes a tenth of a millisecond, and its end
/// interrupts the threads that serve.
pub const PURITY_REQUESTS_PER_SECOND_MAX: u64 = 50_000;

/// Requests that wait for running again, beside the store. What finds no room is not compared.
pub const SAMPLE_QUEUE_MAX: usize = 1024;

/// All of them in bytes.
pub const SAMPLE_QUEUE_BYTES_MAX: u64 = 32 << 20;

/// What one of them costs besides its payload, properties and what it read and wrote, rounded up.
pub const SAMPLE_OVERHEAD_BYTES: u64 = 1024;

/// Keys of which a candidate in shadow is told what they held, though the request did not read them.
pub const SAMPLE_MISSING_READS_MAX: usize = 64;

/// How often a candidate is run for one request, since each answer may lead to the next question.
pub const SAMPLE_ROUNDS_MAX: u32 = 4;

/// Removed keys that the store recalls while a candidate is in shadow: an absent one among them may have been there.
pub const RECENT_REMOVALS_MAX: usize = 4096;

/// Examples of differences that a report holds.
pub const SHADOW_EXAMPLES_MAX: usize = 32;

/// Those of them that differ in the same way, at the same command.
pub const SHADOW_EXAMPLES_ALIKE_MAX: usize = 4;

/// A request or an answer in an example; the rest is cut.
pub const SHADOW_EXAMPLE_BYTES_MAX: usize = 512;

/// Writes that are shown of one request.
pub const SHADOW_EXAMPLE_WRITES_MAX: usize = 8;

/// How often somebody who assigned policies looks whether that is on disk.
pub const ASSIGNED_POLL: Duration = Duration::from_micros(200);

/// Swaps of the active policy that are listed: more than anybody looks at, 64 KiB at most.
pub const SWAPS_LISTED_MAX: usize = 256;

/// How often a change of the assignment is tried again where another came between.
pub const ASSIGN_ATTEMPTS_MAX: u32 = 8;

/// A name that somebody gives for a policy: a name, a version and what is between them.
pub const SELECTOR_BYTES_MAX: usize = 2 * POLICY_NAME_BYTES_MAX + 1;

/// Hex digits of a digest that name a policy.
pub const DIGEST_DIGITS_MIN: usize = 6;

/// Writes that one request may stage: policies that keep books beside the key need a few.
pub const STAGED_WRITES_MAX: usize = 64;

/// What these weigh together: the longest values twice over. With the request itself and its answer, of half as much
/// each, their record stays well below what the journal takes.
pub const STAGED_BYTES_MAX: u64 = 32 << 20;

/// Watch changes that one request may stage.
pub const STAGED_WATCHES_MAX: usize = 64;

/// Head of a reply or notification: a page of SCAN lies in it whole.
pub const REPLY_HEAD_BYTES_MAX: usize = 1 << 20;

/// Name and version in a policy's description: they go on every log line.
pub const POLICY_NAME_BYTES_MAX: usize = 64;

/// Commands in a policy's description: each becomes a metric.
pub const POLICY_COMMANDS_MAX: usize = 64;

/// Keys of one page that a policy asks for.
pub const PAGE_KEYS_MAX: u32 = 1024;

/// Bytes of the keys of one page, beyond its first: what a guest must hold at once.
pub const PAGE_BYTES_MAX: usize = 64 << 10;

/// Keys examined for one page: unreadable and expired ones are passed over, and a page may be
/// empty. The 32 pages of a SCAN are within the fuel of one call, together with the instructions of
/// the standard policy.
pub const PAGE_KEYS_EXAMINED_MAX: usize = 2048;

/// Bytes of the keys looked at for one page: a pattern of a rule may look at each byte of a key, so that long keys take as
/// much time as many. Enough for all [`PAGE_KEYS_EXAMINED_MAX`] of ordinary length.
pub const PAGE_BYTES_EXAMINED_MAX: usize = 512 << 10;

/// Bytes that a policy may draw at once from the seeded generator.
pub const RANDOM_BYTES_MAX: u32 = 1024;

/// A log line of a policy; the rest is cut.
pub const GUEST_LOG_BYTES_MAX: usize = 1024;

/// Log lines by and about a policy in one second; the rest is counted.
pub const GUEST_LOG_LINES_PER_SECOND_MAX: u32 = 20;

/// Distinct counters that a policy may name.
pub const GUEST_COUNTERS_MAX: usize = 256;
