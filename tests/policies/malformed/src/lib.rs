//! A policy whose answers violate the contract in ways that no binding generator allows.
//!
//! `SET key mode` stages a write under `key` and then returns a value that the contract does not
//! allow. `malformations.txt` lists the modes. `SET key fine` and all other requests answer `+OK`.
//!
//! The exports are written by hand for the canonical ABI. There, the fields of a record follow each
//! other in memory, a list is an address and a length, and a variant is a byte and its payload. The
//! result of `describe` depends on [`DESCRIPTION`], which a test overwrites in the module.

#![allow(unsafe_code)]

use std::alloc::Layout;
use std::cell::Cell;

/// Adds the type of the component to the module. Nothing else of it is used.
#[allow(
    missing_docs,
    unreachable_pub,
    dead_code,
    unused_imports,
    clippy::all,
    clippy::undocumented_unsafe_blocks
)]
mod contract {
    wit_bindgen::generate!({ path: "../../../wit", world: "policy", generate_all });
}

/// `fine`, `absurd`, `wild`, `empty`, `no-text`, `reserved`, `trap`, `loop`, `refuse`, `ramble`, or
/// `never` for a policy that fails at every request, padded with dots.
static DESCRIPTION: [u8; 24] = *b"description=fine........";

/// An address beyond the memory limit of all policies.
const WILD: u32 = 0xFFFF_0000;

thread_local! {
    /// The fault of the allocator for the rest of the call.
    static ALLOCATION: Cell<Allocation> = const { Cell::new(Allocation::Fine) };
}

#[derive(Clone, Copy)]
enum Allocation {
    Fine,
    Wild,
    Crooked,
    Reenters,
}

#[link(wasm_import_module = "statehouse:policy/table@1.0.0")]
unsafe extern "C" {
    fn head(kind: u32, at: u32, len: u32, access: u32, answer: *mut u8);
    #[allow(clippy::too_many_arguments)]
    fn put(
        key_kind: u32,
        key_at: u32,
        key_len: u32,
        value_kind: u32,
        value_at: u32,
        value_len: u32,
        observed: u32,
        observed_wall: u64,
        observed_counter: u32,
        fence: u32,
        fence_wall: u64,
        fence_counter: u32,
        fence_at: u32,
        fence_len: u32,
        expires: u32,
        expires_ms: u64,
        answer: *mut u8,
    );
}

#[link(wasm_import_module = "statehouse:policy/property@1.0.0")]
unsafe extern "C" {
    fn get(at: u32, len: u32, answer: *mut u8);
}

#[link(wasm_import_module = "statehouse:policy/log@1.0.0")]
unsafe extern "C" {
    fn write(level: u32, at: u32, len: u32);
}

#[link(wasm_import_module = "statehouse:policy/seeded@1.0.0")]
unsafe extern "C" {
    fn random(len: u32, answer: *mut u8);
}

/// Bytes in the layout of the canonical ABI. They are never freed, because a call is short and the
/// memory is bounded.
struct Laid(&'static mut [u8]);

impl Laid {
    fn new(len: usize) -> Self {
        // The largest alignment in the contract is 64 bits.
        let words = vec![0u64; len.div_ceil(8)].leak();
        // SAFETY: these are the bytes of the leaked words, which have no other owner.
        Self(unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), len) })
    }

    fn byte(self, at: usize, byte: u8) -> Self {
        self.0[at] = byte;
        self
    }

    fn word(self, at: usize, word: u32) -> Self {
        self.0[at..at + 4].copy_from_slice(&word.to_le_bytes());
        self
    }

    /// A list or text: its address and its length.
    fn list(self, at: usize, bytes: &[u8]) -> Self {
        let bytes = bytes.to_vec().leak();
        let len = bytes.len() as u32;
        self.word(at, bytes.as_ptr() as u32).word(at + 4, len)
    }

    fn address(self) -> u32 {
        self.0.as_ptr() as u32
    }
}

/// `info`: name, version, commands.
#[unsafe(export_name = "statehouse:policy/handler@1.0.0#describe")]
extern "C" fn describe() -> u32 {
    let info = Laid::new(24).list(0, b"malformed").list(8, b"0.1.0");
    match description().as_str() {
        // A list of a hundred million commands, for which the memory has no room.
        "absurd" => info.word(16, 1024).word(20, 100_000_000),
        "wild" => info.word(16, WILD).word(20, 1),
        "empty" => info.list(0, b""),
        "no-text" => info.list(0, b"\xFF\xFE"),
        "reserved" => info.list(0, b"builtin"),
        "trap" => std::process::abort(),
        "loop" => loop {
            std::hint::black_box(&info);
        },
        _ => info,
    }
    .address()
}

/// `result<_, string>`.
#[unsafe(export_name = "statehouse:policy/handler@1.0.0#configure")]
extern "C" fn configure(_options_at: u32, _options_len: u32) -> u32 {
    let result = Laid::new(12);
    match description().as_str() {
        "refuse" => result.byte(0, 1).list(4, b"it is never content"),
        "ramble" => result.byte(0, 1).list(4, &[b'\n'; 100_000]),
        _ => result,
    }
    .address()
}

/// `option<span>`.
#[unsafe(export_name = "statehouse:policy/handler@1.0.0#route")]
extern "C" fn route(_payload_at: u32, _payload_len: u32) -> u32 {
    Laid::new(12).address()
}

/// `outcome`: reply (head, body), version, repeat, command.
#[unsafe(export_name = "statehouse:policy/handler@1.0.0#handle")]
extern "C" fn handle(
    payload_at: u32,
    payload_len: u32,
    _dialect: u32,
    _timestamp: u32,
    _timestamp_at: u32,
    _timestamp_len: u32,
    _token: u32,
    _token_at: u32,
    _token_len: u32,
    _client: u32,
    _client_at: u32,
    _client_len: u32,
    _now_ms: u64,
) -> u32 {
    if description() == "never" {
        std::process::abort();
    }
    // SAFETY: the host has written that many bytes to an address that `allocate` returned.
    let payload =
        unsafe { std::slice::from_raw_parts(payload_at as *const u8, payload_len as usize) };
    // The lines are *3 $3 SET $n key $n mode, and an empty one after the last line break.
    let words: Vec<&[u8]> = payload.split(|&byte| byte == b'\n').collect();
    let word = |index: usize| {
        words
            .get(index)
            .map_or(&b""[..], |word| word.trim_ascii_end())
    };
    if word(2) != b"SET" {
        // The host sends a probe before it accepts a policy.
        return answer(b"fine", 0);
    }
    let key_at = word(4).as_ptr() as u32 - payload_at;
    stage(key_at, word(4).len() as u32);
    answer(word(6), key_at)
}

/// `notification`: topic prefix, topic suffix, payload.
#[unsafe(export_name = "statehouse:policy/handler@1.0.0#notify")]
extern "C" fn notify(
    _event: u32,
    _key_at: u32,
    _key_len: u32,
    _wall: u64,
    _counter: u32,
    _len: u32,
    _dialect: u32,
) -> u32 {
    Laid::new(40).word(0, WILD).word(4, 1).address()
}

/// Allocates memory for the host.
///
/// # Safety
///
/// If `old_len` is not zero, an earlier call must have returned `old` for this length and
/// alignment.
#[unsafe(export_name = "cabi_realloc")]
unsafe extern "C" fn allocate(old: *mut u8, old_len: usize, align: usize, len: usize) -> *mut u8 {
    match ALLOCATION.get() {
        Allocation::Fine => {}
        Allocation::Wild => return WILD as *mut u8,
        Allocation::Crooked => return 1025 as *mut u8,
        Allocation::Reenters => {
            let room = Laid::new(64);
            // SAFETY: the buffer is large enough for the answer. Besides, the host refuses the
            // call.
            unsafe { head(0, 0, 1, 0, room.0.as_mut_ptr()) };
        }
    }
    let layout = |len| Layout::from_size_align(len, align);
    match (layout(old_len), layout(len)) {
        // SAFETY: the caller guarantees the address, length and alignment.
        (Ok(layout), _) if old_len > 0 => unsafe { std::alloc::realloc(old, layout, len) },
        // SAFETY: the length is not zero.
        (_, Ok(layout)) if len > 0 => unsafe { std::alloc::alloc(layout) },
        _ => align as *mut u8,
    }
}

/// The word in [`DESCRIPTION`]. The compiler must not assume its value, because a test changes it
/// in the module.
fn description() -> String {
    let bytes = std::hint::black_box(&DESCRIPTION);
    // SAFETY: this reads a static that is not written while the module runs.
    let bytes = unsafe { std::ptr::read_volatile(bytes) };
    let word = String::from_utf8_lossy(&bytes["description=".len()..]);
    word.trim_end_matches('.').to_owned()
}

/// Stages a write under the key. The host must roll it back when the answer fails.
fn stage(at: u32, len: u32) {
    let room = Laid::new(64);
    let answer = room.0.as_mut_ptr();
    // SAFETY: the key lies in the payload, and the buffer is large enough for the answer.
    unsafe {
        head(0, at, len, 1, answer);
        put(0, at, len, 0, at, len, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, answer);
    }
}

fn answer(mode: &[u8], key_at: u32) -> u32 {
    let outcome = Laid::new(56).list(0, b"+OK\r\n");
    let room = Laid::new(64);
    let buffer = room.0.as_mut_ptr();
    match mode {
        b"head-wild" => outcome.word(0, WILD).word(4, 100),
        b"head-wrapping" => outcome.word(4, u32::MAX),
        b"head-absurd" => outcome.word(4, 31 << 20),
        b"body-unknown" => outcome.byte(8, 7),
        b"stored-unknown" => outcome.byte(8, 1).byte(12, 9),
        b"stored-wild" => outcome.byte(8, 1).byte(12, 1).word(16, WILD).word(20, 100),
        b"given-absurd" => outcome.byte(8, 2).word(12, u32::MAX).word(16, u32::MAX),
        b"version-unknown" => outcome.byte(24, 2),
        b"repeat-unknown" => outcome.byte(48, 5),
        b"command-unknown" => outcome.byte(50, 3),
        b"answer-wild" => return WILD,
        b"answer-crooked" => return outcome.address() + 1,
        // SAFETY: the host checks the invalid arguments and traps.
        _ => unsafe {
            match mode {
                b"access-unknown" => head(0, key_at, 1, 9, buffer),
                b"key-wild" => head(1, WILD, 100, 0, buffer),
                b"key-unknown" => head(7, key_at, 1, 0, buffer),
                b"key-absurd" => head(1, 0, u32::MAX, 0, buffer),
                b"name-no-text" => get(b"\xFF\xFE".as_ptr() as u32, 2, buffer),
                b"log-wild" => write(3, WILD, 1 << 30),
                b"allocation-wild" => allocated(Allocation::Wild, buffer),
                b"allocation-crooked" => allocated(Allocation::Crooked, WILD as *mut u8),
                b"allocation-reenters" => allocated(Allocation::Reenters, buffer),
                _ => {}
            }
            outcome
        },
    }
    .address()
}

/// Makes the host write a list into memory of an allocator with this fault.
///
/// # Safety
///
/// `answer` must have room for a list, unless the call must trap.
unsafe fn allocated(how: Allocation, answer: *mut u8) {
    ALLOCATION.set(how);
    // SAFETY: the caller guarantees the room, or expects a trap.
    unsafe { random(100, answer) };
    ALLOCATION.set(Allocation::Fine);
}
