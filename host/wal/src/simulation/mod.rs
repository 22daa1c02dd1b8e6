//! A simulated disk in memory that loses, tears and corrupts unsynced data, for tests of the log
//! and its users.
//!
//! Input is calls of [`Disk`], crashes and faults. The same seed always produces the same bytes.
//!
//! The simulation tracks written and synced data separately, by sector and by file name. A crash
//! keeps any subset of the unsynced data: in another order, torn inside a sector, or with a flipped
//! bit. A failed sync behaves as on Linux: the data remains readable and counts as written, but the
//! next crash loses it. Blocks can become unreadable.

mod dice;
mod images;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::io::Errno;

use crate::disk::{Disk, File};
use crate::log::locked;

pub use dice::Dice;
pub use images::Image;

/// The unit that a device writes at once.
pub const SECTOR_BYTES: usize = 512;

/// The unit that a file system writes at once, and most flash memory at least.
pub const BLOCK_BYTES: usize = 4096;

/// What syncs have written to the device since the directory was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Syncs of files.
    pub syncs: u64,
    /// Blocks of files that syncs wrote. A block counts once per sync, however often it changed.
    pub blocks: u64,
}

#[derive(Clone, Debug, Default)]
struct Inode {
    /// The content that a reader sees.
    content: Vec<u8>,
    /// The content that is certainly on the device.
    durable: Vec<u8>,
    /// Sectors that were written and not synced.
    dirty: BTreeSet<usize>,
    /// Blocks that the device does not return.
    unreadable: BTreeSet<usize>,
}

impl Inode {
    /// Fails if a part of these bytes is in a block that the device does not return.
    fn check_readable(&self, offset: usize, bytes: usize) -> io::Result<()> {
        let end = (offset + bytes).div_ceil(BLOCK_BYTES);
        match self.unreadable.range(offset / BLOCK_BYTES..end).next() {
            Some(_) => Err(Errno::IO.into()),
            None => Ok(()),
        }
    }

    fn write(&mut self, bytes: &[u8], offset: usize) {
        let end = offset + bytes.len();
        if self.content.len() < end {
            self.content.resize(end, 0);
        }
        self.content[offset..end].copy_from_slice(bytes);
        if !bytes.is_empty() {
            self.dirty
                .extend(offset / SECTOR_BYTES..=(end - 1) / SECTOR_BYTES);
        }
    }

    /// Stores a sector, or its first bytes, on the device.
    fn store(&mut self, sector: usize, bytes_max: usize) {
        let from = sector * SECTOR_BYTES;
        let to = (from + bytes_max.min(SECTOR_BYTES)).min(self.content.len());
        if self.durable.len() < to {
            self.durable.resize(to, 0);
        }
        self.durable[from..to].copy_from_slice(&self.content[from..to]);
    }

    /// Stores a sector on the device with one bit flipped among the changed bytes. Bytes that are
    /// rewritten unchanged stay intact, because the log relies on that, see [`crate::frame`].
    fn spoil(&mut self, sector: usize, dice: &mut Dice) {
        let from = sector * SECTOR_BYTES;
        let to = (from + SECTOR_BYTES).min(self.content.len());
        let new = |&at: &usize| self.durable.get(at) != self.content.get(at);
        let changed: Vec<usize> = (from..to).filter(new).collect();
        self.store(sector, SECTOR_BYTES);
        if !changed.is_empty() {
            let at = changed[dice.below(changed.len() as u64) as usize];
            self.durable[at] ^= 1 << dice.below(8);
        }
    }

    fn sync(&mut self) {
        for sector in std::mem::take(&mut self.dirty) {
            self.store(sector, SECTOR_BYTES);
        }
    }

    fn dirty_blocks(&self) -> u64 {
        let blocks: BTreeSet<usize> = (self.dirty.iter())
            .map(|sector| sector * SECTOR_BYTES / BLOCK_BYTES)
            .collect();
        blocks.len() as u64
    }

    /// Discards everything that is not on the device.
    fn lose(&mut self) {
        self.dirty.clear();
        self.content.clone_from(&self.durable);
    }
}

/// A change of names: the file that each of them has from now on, if any.
#[derive(Clone, Debug)]
struct NameOp(Vec<(String, Option<usize>)>);

impl NameOp {
    fn apply(&self, names: &mut BTreeMap<String, usize>) {
        for (name, inode) in &self.0 {
            match inode {
                Some(inode) => _ = names.insert(name.clone(), *inode),
                None => _ = names.remove(name),
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Event {
    Write {
        inode: usize,
        offset: usize,
        bytes: Vec<u8>,
    },
    Sync {
        inode: usize,
    },
    Name(NameOp),
    SyncNames,
    Mark(u64),
}

#[derive(Clone, Debug, Default)]
struct World {
    inodes: Vec<Inode>,
    names: BTreeMap<String, usize>,
    durable_names: BTreeMap<String, usize>,
    name_ops: Vec<NameOp>,
    generation: u64,
    entropy: u64,
    fail_write_in: Option<u64>,
    fail_sync_in: Option<u64>,
    capacity_bytes: Option<u64>,
    capacity_files: Option<usize>,
    refuses_renames: bool,
    forbidden: Option<String>,
    written: Written,
    trace: Option<Vec<Event>>,
}

impl World {
    fn note(&mut self, event: impl FnOnce() -> Event) {
        if let Some(trace) = &mut self.trace {
            trace.push(event());
        }
    }

    fn name(&mut self, names: &[(&str, Option<usize>)]) {
        let names = names
            .iter()
            .map(|(name, inode)| ((*name).to_owned(), *inode));
        let op = NameOp(names.collect());
        op.apply(&mut self.names);
        self.note(|| Event::Name(op.clone()));
        self.name_ops.push(op);
    }

    fn find(&self, name: &str) -> io::Result<usize> {
        self.names
            .get(name)
            .copied()
            .ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn sync_names(&mut self) {
        for op in std::mem::take(&mut self.name_ops) {
            op.apply(&mut self.durable_names);
        }
    }

    fn used_bytes(&self) -> u64 {
        self.names
            .values()
            .map(|&inode| self.inodes[inode].content.len() as u64)
            .sum()
    }

    /// Bytes that files may still grow by.
    fn room(&self) -> u64 {
        self.capacity_bytes.map_or(u64::MAX / 2, |capacity| {
            capacity.saturating_sub(self.used_bytes())
        })
    }

    /// Counts down to a fault.
    fn due(counter: &mut Option<u64>) -> io::Result<()> {
        match counter {
            Some(0) => Err(io::Error::other("simulated input/output error")),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn lose(&mut self) {
        self.inodes.iter_mut().for_each(Inode::lose);
        self.names.clone_from(&self.durable_names);
        self.name_ops.clear();
        self.generation += 1;
        (self.fail_write_in, self.fail_sync_in) = (None, None);
    }

    fn apply(&mut self, event: &Event) {
        match event {
            Event::Write {
                inode,
                offset,
                bytes,
            } => self.inode(*inode).write(bytes, *offset),
            Event::Sync { inode } => self.inode(*inode).sync(),
            Event::Name(op) => {
                op.apply(&mut self.names);
                self.name_ops.push(op.clone());
                for inode in op.0.iter().filter_map(|(_, inode)| *inode) {
                    self.inode(inode);
                }
            }
            Event::SyncNames => self.sync_names(),
            Event::Mark(_) => {}
        }
    }

    fn inode(&mut self, inode: usize) -> &mut Inode {
        if self.inodes.len() <= inode {
            self.inodes.resize_with(inode + 1, Inode::default);
        }
        &mut self.inodes[inode]
    }
}

/// A directory in memory. A clone is another handle to the same directory; [`Simulation::fork`]
/// makes a copy.
#[derive(Clone, Debug)]
pub struct Simulation {
    world: Arc<Mutex<World>>,
    generation: u64,
}

struct Handle {
    disk: Simulation,
    inode: usize,
    writable: bool,
}

fn fresh(world: World) -> Simulation {
    let generation = world.generation;
    Simulation {
        world: Arc::new(Mutex::new(world)),
        generation,
    }
}

impl Simulation {
    /// An empty directory.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        fresh(World {
            entropy: seed,
            ..World::default()
        })
    }

    fn world(&self) -> io::Result<MutexGuard<'_, World>> {
        let world = locked(&self.world);
        if world.generation == self.generation {
            Ok(world)
        } else {
            Err(io::Error::other("this handle did not survive the crash"))
        }
    }

    fn handle(&self, inode: usize, writable: bool) -> Arc<dyn File> {
        let disk = self.clone();
        Arc::new(Handle {
            disk,
            inode,
            writable,
        })
    }

    fn now(&self) -> Self {
        let generation = locked(&self.world).generation;
        Self {
            world: Arc::clone(&self.world),
            generation,
        }
    }

    /// An independent copy.
    #[must_use]
    pub fn fork(&self) -> Self {
        fresh(locked(&self.world).clone())
    }

    /// Simulates a power failure and returns the directory that the next start finds. Old handles
    /// fail.
    #[must_use]
    pub fn crash(&self, seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let mut world = locked(&self.world);
        // Some crashes lose nearly everything, some nearly nothing.
        let (kept, of) = [(0, 1), (1, 1), (1, 2), (9, 10), (1, 10)][dice.below(5) as usize];
        for inode in &mut world.inodes {
            for sector in std::mem::take(&mut inode.dirty) {
                if dice.below(of) >= kept {
                    continue;
                }
                match dice.below(8) {
                    0 => inode.store(sector, dice.below(SECTOR_BYTES as u64) as usize),
                    1 => inode.spoil(sector, &mut dice),
                    _ => inode.store(sector, SECTOR_BYTES),
                }
            }
        }
        for op in std::mem::take(&mut world.name_ops) {
            if dice.below(of) < kept {
                op.apply(&mut world.durable_names);
            }
        }
        world.lose();
        drop(world);
        self.now()
    }

    /// Simulates the death of the process: the page cache survives. Old handles fail.
    #[must_use]
    pub fn kill(&self) -> Self {
        let mut world = locked(&self.world);
        world.generation += 1;
        (world.fail_write_in, world.fail_sync_in) = (None, None);
        drop(world);
        self.now()
    }

    /// Fails every write after the next `writes` ones, until it is called with `None`. Creating,
    /// renaming and removing files count as writes.
    pub fn fail_write_in(&self, writes: Option<u64>) {
        locked(&self.world).fail_write_in = writes;
    }

    /// Fails every sync after the next `syncs` ones, until it is called with `None`.
    pub fn fail_sync_in(&self, syncs: Option<u64>) {
        locked(&self.world).fail_sync_in = syncs;
    }

    /// Makes the disk full when all files together have this many bytes.
    pub fn limit_bytes(&self, bytes: Option<u64>) {
        locked(&self.world).capacity_bytes = bytes;
    }

    /// Makes the disk run out of inodes when it has this many files.
    pub fn limit_files(&self, files: Option<usize>) {
        locked(&self.world).capacity_files = files;
    }

    /// Lets the disk refuse to rename files, as if it had no room for names.
    pub fn refuse_renames(&self, refuses: bool) {
        locked(&self.world).refuses_renames = refuses;
    }

    /// Denies this account the right to read a file.
    pub fn forbid(&self, name: &str) {
        locked(&self.world).forbidden = Some(name.to_owned());
    }

    /// Makes the block at an offset of a file unreadable, as a broken sector does. A write to it
    /// fails, too, because a file system reads a block before it changes a part of it.
    pub fn break_block(&self, name: &str, offset: usize) {
        let mut world = locked(&self.world);
        if let Some(&inode) = world.names.get(name) {
            world.inodes[inode].unreadable.insert(offset / BLOCK_BYTES);
        }
    }

    /// Bytes of all files.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        locked(&self.world).used_bytes()
    }

    /// What syncs have written to the device.
    #[must_use]
    pub fn written(&self) -> Written {
        locked(&self.world).written
    }

    /// The content of a file, as a reader sees it.
    #[must_use]
    pub fn content(&self, name: &str) -> Option<Vec<u8>> {
        let world = locked(&self.world);
        world
            .names
            .get(name)
            .map(|&inode| world.inodes[inode].content.clone())
    }

    /// Replaces a file durably, to simulate damage that is not caused by a crash.
    pub fn put(&self, name: &str, content: &[u8]) {
        let mut world = locked(&self.world);
        let inode = world.inodes.len();
        world.inodes.push(Inode {
            content: content.to_vec(),
            durable: content.to_vec(),
            ..Inode::default()
        });
        world.names.insert(name.to_owned(), inode);
        world.durable_names.insert(name.to_owned(), inode);
    }
}

impl Event {
    fn word(&self) -> &'static str {
        match self {
            Self::Write { .. } => "write",
            Self::Sync { .. } => "sync",
            Self::Name(_) => "name",
            Self::SyncNames => "sync of names",
            Self::Mark(_) => "mark",
        }
    }
}

impl Disk for Simulation {
    fn list(&self) -> io::Result<Vec<String>> {
        Ok(self.world()?.names.keys().cloned().collect())
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn File>> {
        let is_full = !self.has_free_inodes()?;
        let mut world = self.world()?;
        World::due(&mut world.fail_write_in)?;
        if is_full && !world.names.contains_key(name) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let inode = world.inodes.len();
        world.inodes.push(Inode::default());
        world.name(&[(name, Some(inode))]);
        Ok(self.handle(inode, true))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn File>> {
        let inode = self.world()?.find(name)?;
        Ok(self.handle(inode, true))
    }

    fn open_read_only(&self, name: &str) -> io::Result<Arc<dyn File>> {
        let world = self.world()?;
        if world.forbidden.as_deref() == Some(name) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        Ok(self.handle(world.find(name)?, false))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut world = self.world()?;
        World::due(&mut world.fail_write_in)?;
        if world.refuses_renames {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let inode = world.find(from)?;
        world.name(&[(from, None), (to, Some(inode))]);
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let mut world = self.world()?;
        World::due(&mut world.fail_write_in)?;
        world.find(name)?;
        world.name(&[(name, None)]);
        Ok(())
    }

    fn sync_directory(&self) -> io::Result<()> {
        let mut world = self.world()?;
        World::due(&mut world.fail_sync_in)?;
        world.sync_names();
        world.note(|| Event::SyncNames);
        Ok(())
    }

    fn free_bytes(&self) -> io::Result<u64> {
        Ok(self.world()?.room())
    }

    fn has_free_inodes(&self) -> io::Result<bool> {
        let world = self.world()?;
        Ok((world.capacity_files).is_none_or(|most| world.names.len() < most))
    }

    fn entropy(&self) -> u64 {
        let mut world = locked(&self.world);
        world.entropy = Dice::new(world.entropy).roll();
        world.entropy
    }
}

impl File for Handle {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let world = self.disk.world()?;
        let inode = &world.inodes[self.inode];
        let content = &inode.content;
        let from = content.len().min(offset as usize);
        let bytes = buffer.len().min(content.len() - from);
        inode.check_readable(from, bytes)?;
        buffer[..bytes].copy_from_slice(&content[from..from + bytes]);
        Ok(bytes)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut world = self.disk.world()?;
        if !self.writable {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let offset = offset as usize;
        world.inodes[self.inode].check_readable(offset, bytes.len())?;
        let failed = World::due(&mut world.fail_write_in);
        let held = world.inodes[self.inode].content.len();
        let growth = (offset + bytes.len()).saturating_sub(held) as u64;
        let room = world.room();
        let outcome = match failed {
            Ok(()) if growth > room => Err(io::ErrorKind::StorageFull.into()),
            failed => failed,
        };
        // A failed write may have written a part.
        let bytes = match &outcome {
            Ok(()) => bytes,
            Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                &bytes[..(held.saturating_sub(offset) + room as usize).min(bytes.len())]
            }
            Err(_) => &bytes[..bytes.len() / 2],
        };
        world.inodes[self.inode].write(bytes, offset);
        let inode = self.inode;
        world.note(|| Event::Write {
            inode,
            offset,
            bytes: bytes.to_vec(),
        });
        outcome
    }

    fn sync(&self) -> io::Result<()> {
        let mut world = self.disk.world()?;
        let failed = World::due(&mut world.fail_sync_in);
        let mut dice = Dice::new(world.entropy ^ self.inode as u64);
        let inode = &mut world.inodes[self.inode];
        if failed.is_err() {
            for sector in std::mem::take(&mut inode.dirty) {
                if dice.once_in(2) {
                    inode.store(sector, SECTOR_BYTES);
                }
            }
            return failed;
        }
        let blocks = inode.dirty_blocks();
        inode.sync();
        world.written.syncs += 1;
        world.written.blocks += blocks;
        let inode = self.inode;
        world.note(|| Event::Sync { inode });
        Ok(())
    }

    fn bytes(&self) -> io::Result<u64> {
        Ok(self.disk.world()?.inodes[self.inode].content.len() as u64)
    }
}
