//! The allocator of a component. It places the blocks of a call side by side in a fixed arena, and
//! reuses the arena for the next call.
//!
//! A call of a policy allocates a few small blocks (the payload, a few strings, the head of the
//! reply) and frees all of them before the next call. So the arena takes each block from the front
//! of its free space, and is empty again when the last live block is freed. That costs a few
//! instructions; the allocator of the standard library needs some hundred.
//!
//! The standard allocator serves all other blocks: large ones, and those that a policy keeps from
//! `configure`, which runs before the arena opens. A block that a policy keeps from a later call
//! prevents the reuse of the arena. The arena then fills up, and all further blocks come from the
//! standard allocator: slower, but with bounded memory.

#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::{Cell, UnsafeCell};
use std::mem::MaybeUninit;

use crate::limits::ARENA_BYTES;

/// Blocks start and end at multiples of this; blocks with a larger alignment are allocated
/// elsewhere. All numbers of WebAssembly fit, except vectors.
const UNIT_BYTES: usize = 8;

// A block whose size fits must still fit when it is rounded up to whole units.
const _: () = assert!(ARENA_BYTES.is_multiple_of(UNIT_BYTES));

/// The arena for the blocks of a call. [`export!`](crate::export) makes it the global allocator.
#[derive(Debug)]
#[repr(C, align(8))]
pub struct Arena {
    room: UnsafeCell<[MaybeUninit<u8>; ARENA_BYTES]>,
    /// The bytes after all live blocks, a multiple of the unit. Zero until the arena opens.
    free: Cell<usize>,
    /// Number of live blocks.
    live: Cell<usize>,
}

// SAFETY: without atomics this target has no threads, so the arena is never shared between threads.
#[cfg(all(target_arch = "wasm32", not(target_feature = "atomics")))]
unsafe impl Sync for Arena {}

impl Arena {
    /// A closed arena: all blocks come from the standard allocator.
    #[must_use]
    #[allow(
        clippy::new_without_default,
        reason = "a static needs a constant, and there is no other use"
    )]
    pub const fn new() -> Self {
        Self {
            room: UnsafeCell::new([MaybeUninit::uninit(); ARENA_BYTES]),
            free: Cell::new(0),
            live: Cell::new(0),
        }
    }

    /// Opens the arena. Later blocks are expected to be freed soon.
    pub fn open(&self) {
        if self.live.get() == 0 {
            self.free.set(ARENA_BYTES);
        }
    }

    /// The offset of the next block.
    fn used(&self) -> usize {
        ARENA_BYTES - self.free.get()
    }

    fn start(&self) -> *mut u8 {
        self.room.get().cast()
    }

    /// The offset of a block in the arena; for other blocks an arbitrary value that is beyond its
    /// end.
    fn offset(&self, block: *mut u8) -> usize {
        block.addr().wrapping_sub(self.start().addr())
    }
}

const fn round_up(bytes: usize) -> usize {
    bytes.next_multiple_of(UNIT_BYTES)
}

// SAFETY: a block is taken from the front of the free space. The free space grows only by the block
// directly before it, when that is freed or shortened, or to the whole arena when no block is live.
// So no block overlaps a live one. The arena does not move, since the caller keeps it in place
// while it has live blocks. Nothing here unwinds. Blocks outside of the arena are passed to
// `System` unchanged.
unsafe impl GlobalAlloc for Arena {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let free = self.free.get();
        if layout.size() > free || layout.align() > UNIT_BYTES {
            // SAFETY: the caller's promise about the layout is passed on.
            return unsafe { System.alloc(layout) };
        }
        self.free.set(free - round_up(layout.size()));
        self.live.set(self.live.get() + 1);
        // SAFETY: `free` never exceeds the size of the arena, so the sum is within it.
        unsafe { self.start().add(ARENA_BYTES - free) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        let at = self.offset(block);
        if at >= ARENA_BYTES {
            // SAFETY: the block is not in the arena, so it came from `System` with this layout.
            return unsafe { System.dealloc(block, layout) };
        }
        // The block is in the arena, so at least one block is live.
        let live = self.live.get() - 1;
        self.live.set(live);
        if live == 0 {
            self.free.set(ARENA_BYTES);
        } else if at + round_up(layout.size()) == self.used() {
            self.free.set(ARENA_BYTES - at);
        }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        let at = self.offset(block);
        if at >= ARENA_BYTES {
            // SAFETY: as in `dealloc`.
            return unsafe { System.realloc(block, layout, new_size) };
        }
        let is_last = at + round_up(layout.size()) == self.used();
        if is_last && new_size <= ARENA_BYTES - at {
            self.free.set(ARENA_BYTES - at - round_up(new_size));
            return block;
        }
        if new_size <= layout.size() {
            return block;
        }
        // SAFETY: the caller promises that the new size, rounded up to the alignment, fits `isize`.
        let new_layout = unsafe { Layout::from_size_align_unchecked(new_size, layout.align()) };
        // SAFETY: the new size is more than the old one, so it is not zero.
        let new_block = unsafe { self.alloc(new_layout) };
        if !new_block.is_null() {
            // SAFETY: both blocks are at least as long as the old one, and the new one overlaps no
            // live block.
            unsafe { new_block.copy_from_nonoverlapping(block, layout.size()) };
            // SAFETY: the caller promises that the block is live and has this layout.
            unsafe { self.dealloc(block, layout) };
        }
        new_block
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A live block and the byte it is filled with.
    struct Block {
        at: *mut u8,
        layout: Layout,
        filling: u8,
    }

    impl Block {
        fn new(arena: &Arena, size: usize, align: usize, filling: u8) -> Self {
            let layout = Layout::from_size_align(size, align).expect("a good layout");
            // SAFETY: the size is not zero in any test.
            let at = unsafe { arena.alloc(layout) };
            assert!(!at.is_null() && at.addr().is_multiple_of(align));
            // SAFETY: the block is as long as that.
            unsafe { at.write_bytes(filling, size) };
            let block = Self {
                at,
                layout,
                filling,
            };
            block.check();
            block
        }

        fn check(&self) {
            // SAFETY: all of the block was written.
            let bytes = unsafe { std::slice::from_raw_parts(self.at, self.layout.size()) };
            assert!(bytes.iter().all(|&byte| byte == self.filling));
        }

        fn resize(&mut self, arena: &Arena, size: usize) {
            self.check();
            // SAFETY: the block is live and has this layout; the size is not zero in any test.
            self.at = unsafe { arena.realloc(self.at, self.layout, size) };
            assert!(!self.at.is_null() && self.at.addr().is_multiple_of(self.layout.align()));
            let kept = self.layout.size().min(size);
            self.layout = Layout::from_size_align(size, self.layout.align()).expect("good");
            // SAFETY: the kept part is initialized; the rest is initialized here.
            unsafe { self.at.add(kept).write_bytes(self.filling, size - kept) };
            self.check();
        }

        fn free(self, arena: &Arena) {
            self.check();
            // SAFETY: the block is live and has this layout.
            unsafe { arena.dealloc(self.at, self.layout) };
        }

        fn is_in(&self, arena: &Arena) -> bool {
            arena.offset(self.at) < ARENA_BYTES
        }
    }

    fn open() -> Box<Arena> {
        let arena = Box::new(Arena::new());
        arena.open();
        arena
    }

    #[test]
    fn a_closed_arena_takes_no_block() {
        let arena = Box::new(Arena::new());
        let kept = Block::new(&arena, 8, 8, 1);
        assert!(!kept.is_in(&arena));
        arena.open();
        let first = Block::new(&arena, 8, 8, 2);
        assert!(first.is_in(&arena));
        first.free(&arena);
        kept.free(&arena);
        assert_eq!((arena.live.get(), arena.used()), (0, 0));
    }

    #[test]
    fn the_arena_is_empty_after_every_call() {
        let arena = open();
        for call in 0..3 * ARENA_BYTES {
            let payload = Block::new(&arena, 100, 1, 1);
            let text = Block::new(&arena, 27, 1, 2);
            let reply = Block::new(&arena, 7, 4, 3);
            assert!(payload.is_in(&arena) && reply.is_in(&arena), "{call}");
            payload.free(&arena);
            text.free(&arena);
            reply.free(&arena);
        }
    }

    #[test]
    fn a_full_arena_takes_no_block() {
        let arena = open();
        let kept = Block::new(&arena, ARENA_BYTES - 9, 1, 1);
        let last = Block::new(&arena, 8, 8, 2);
        let beyond = Block::new(&arena, 1, 1, 3);
        assert!(kept.is_in(&arena) && last.is_in(&arena) && !beyond.is_in(&arena));
        beyond.free(&arena);
        last.free(&arena);
        let again = Block::new(&arena, 3, 1, 4);
        assert!(again.is_in(&arena));
        kept.free(&arena);
        again.free(&arena);
        assert!(!Block::new(&arena, ARENA_BYTES + 1, 1, 5).is_in(&arena));
        assert!(!Block::new(&arena, 16, 16, 5).is_in(&arena));
    }

    #[test]
    fn a_kept_block_only_prevents_the_reuse_of_the_arena() {
        let arena = open();
        let kept = Block::new(&arena, 64, 8, 1);
        let mut in_the_room = 0;
        for _ in 0..ARENA_BYTES / 16 {
            let payload = Block::new(&arena, 100, 1, 2);
            let text = Block::new(&arena, 27, 1, 3);
            in_the_room += usize::from(payload.is_in(&arena));
            payload.free(&arena);
            text.free(&arena);
        }
        assert!(in_the_room < ARENA_BYTES / 100);
        kept.free(&arena);
        let again = Block::new(&arena, 64, 8, 4);
        assert!(again.is_in(&arena));
        again.free(&arena);
    }

    #[test]
    fn the_last_block_grows_in_place() {
        let arena = open();
        let mut first = Block::new(&arena, 5, 1, 1);
        let mut last = Block::new(&arena, 5, 1, 2);
        let at = last.at;
        last.resize(&arena, 500);
        assert_eq!(last.at, at);
        first.resize(&arena, 9);
        assert!(first.is_in(&arena) && first.at > last.at);
        last.resize(&arena, ARENA_BYTES);
        assert!(!last.is_in(&arena));
        first.free(&arena);
        last.free(&arena);
        assert_eq!((arena.live.get(), arena.used()), (0, 0));
    }

    proptest! {
        #[test]
        fn blocks_never_overlap(
            steps in proptest::collection::vec((0..3u8, 0..16usize, 1..9000usize, 0..5u32), 1..200),
        ) {
            let arena = open();
            let mut blocks: Vec<Block> = Vec::new();
            for (step, (what, which, size, align)) in steps.into_iter().enumerate() {
                let which = if blocks.is_empty() { None } else { Some(which % blocks.len()) };
                match (what, which) {
                    (1, Some(which)) => blocks.swap_remove(which).free(&arena),
                    (2, Some(which)) => blocks[which].resize(&arena, size),
                    _ => blocks.push(Block::new(&arena, size, 1 << align, step as u8)),
                }
                blocks.iter().for_each(Block::check);
                let inside = blocks.iter().filter(|block| block.is_in(&arena)).count();
                prop_assert_eq!(inside, arena.live.get());
            }
            for block in blocks {
                block.free(&arena);
            }
            prop_assert_eq!((arena.live.get(), arena.used()), (0, 0));
        }
    }
}
