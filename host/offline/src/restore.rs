//! A data directory of a backup.
//!
//! What enters: a backup, of which every byte and block is looked at first. What leaves: a directory that `serve`
//! begins with, in the state of the backup. It touches no directory that has a journal.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use statehouse_wal::{
    Directory, Error, LogPosition, Options, Sink, Source, create_from_snapshot, read_snapshot_file,
};

use super::backup::{Contents, ModuleState, Settled};
use super::{EVERYTHING, PastError};
use crate::limits;
use statehouse_core::log::{Block, Image, read_block};
use statehouse_precompiled::Modules;

/// Makes a data directory of a backup, and says what it holds.
pub fn restore(file: &Path, directory: &Path, now_ms: u64) -> Result<Contents, PastError> {
    let mut image = Image::new(EVERYTHING);
    let mut found = HashSet::new();
    let mut check = Check {
        image: &mut image,
        module: &mut |digest, _| {
            found.insert(*digest);
            Ok(())
        },
    };
    let position = read_snapshot_file(file, &mut check).map_err(|error| unreadable(file, error))?;
    let module = |digest: &blake3::Hash| match found.contains(digest) {
        true => ModuleState::Whole,
        false => ModuleState::absent(digest),
    };
    let contents = Settled::of(image).contents(position, module);

    let failed = |error| PastError::Journal(directory.to_owned(), error);
    let disk = Directory::open(directory).map_err(failed)?;
    if statehouse_wal::has_journal(&disk)
        .map_err(|error| PastError::Io(directory.to_owned(), error))?
    {
        return Err(PastError::Refused(format!(
            "{} holds a store already, and nothing of it was changed: restore into an empty directory, or one that is not there yet",
            directory.display()
        )));
    }
    // Before the journal that needs them: a restore that ends here is begun again.
    save_modules(file, &Modules::of(directory))?;
    let created = thread::scope(|scope| {
        let (blocks, source) = sync_channel(limits::RESTORE_BLOCKS_MAX);
        scope.spawn(move || copy(file, &blocks));
        let mut source = Blocks(source);
        let disk = Arc::new(disk);
        create_from_snapshot(disk, Options::default(), position, now_ms, &mut source)
    });
    created.map_err(|error| not_restored(directory, error))?;
    Ok(contents)
}

fn not_restored(directory: &Path, error: Error) -> PastError {
    let why = format!(
        "was not restored: {error}. What is in it now is no store: remove it, and restore again"
    );
    match error {
        Error::Io { source, .. } => {
            let why = std::io::Error::new(source.kind(), why);
            PastError::Io(directory.to_owned(), why)
        }
        _ => PastError::Refused(format!("{} {why}", directory.display())),
    }
}

/// The table of a backup and its time, and nothing else.
pub fn read_backup(file: &Path) -> Result<Image, PastError> {
    let mut image = Image::of_keys();
    let mut check = Check {
        image: &mut image,
        module: &mut |_, _| Ok(()),
    };
    read_snapshot_file(file, &mut check).map_err(|error| unreadable(file, error))?;
    Ok(image)
}

fn unreadable(file: &Path, error: Error) -> PastError {
    let why = match error {
        Error::Io { source, .. } => format!("cannot be read: {source}"),
        Error::Damaged(damage) => format!(
            "is damaged at byte {}: {}. Nothing was restored; take another backup",
            damage.offset, damage.reason
        ),
        other => format!("cannot be used: {other}"),
    };
    PastError::Backup(file.to_owned(), why)
}

fn save_modules(file: &Path, modules: &Modules) -> Result<(), PastError> {
    let mut save = |digest: &blake3::Hash, module: &[u8]| {
        modules
            .save(digest, module)
            .map_err(|error| format!("{}: {error}", modules.path(digest).display()))
    };
    let mut saving = Saving(&mut save);
    read_snapshot_file(file, &mut saving)
        .map(drop)
        .map_err(|error| unreadable(file, error))
}

/// What becomes of a module.
type Take<'a> = &'a mut dyn FnMut(&blake3::Hash, &[u8]) -> Result<(), String>;

/// The first reading: everything is decoded.
struct Check<'a> {
    image: &'a mut Image,
    module: Take<'a>,
}

impl Sink for Check<'_> {
    fn reset(&mut self) {
        self.image.reset();
    }

    fn block(&mut self, block: &[u8]) -> Result<(), String> {
        take_module(block, self.module)?;
        self.image.block(block).map_err(|error| error.to_string())
    }

    fn record(&mut self, _: LogPosition, _: &[u8]) -> Result<(), String> {
        Ok(())
    }
}

/// The second reading: modules become files.
struct Saving<'a>(Take<'a>);

impl Sink for Saving<'_> {
    fn reset(&mut self) {}

    fn block(&mut self, block: &[u8]) -> Result<(), String> {
        take_module(block, self.0)
    }

    fn record(&mut self, _: LogPosition, _: &[u8]) -> Result<(), String> {
        Ok(())
    }
}

fn take_module(block: &[u8], take: Take<'_>) -> Result<(), String> {
    match read_block(block).map_err(|error| error.to_string())? {
        Block::Module { digest, file } if blake3::hash(file) == digest => take(&digest, file),
        Block::Module { .. } => Err("a module that is not what its name says".into()),
        _ => Ok(()),
    }
}

/// A block, or the end of all, or why there is none.
type Sent = Result<Option<Vec<u8>>, String>;

/// The third reading: everything but modules goes into the journal.
fn copy(file: &Path, blocks: &SyncSender<Sent>) {
    struct Copy<'a>(&'a SyncSender<Sent>);

    impl Sink for Copy<'_> {
        fn reset(&mut self) {}

        fn block(&mut self, block: &[u8]) -> Result<(), String> {
            match read_block(block).map_err(|error| error.to_string())? {
                Block::Module { .. } => Ok(()),
                _ => self
                    .0
                    .send(Ok(Some(block.to_vec())))
                    .map_err(|_| "nobody takes it".into()),
            }
        }

        fn record(&mut self, _: LogPosition, _: &[u8]) -> Result<(), String> {
            Ok(())
        }
    }

    let end = read_snapshot_file(file, &mut Copy(blocks))
        .map(|_| None)
        .map_err(|error| error.to_string());
    // Where nobody listens any more, the other side has failed and says so itself.
    let _ = blocks.send(end);
}

struct Blocks(Receiver<Sent>);

impl Source for Blocks {
    fn begin(&mut self) {}

    fn next(&mut self, block: &mut Vec<u8>) -> Result<bool, String> {
        match self.0.recv() {
            Ok(Ok(Some(next))) => {
                *block = next;
                Ok(true)
            }
            Ok(Ok(None)) => Ok(false),
            Ok(Err(why)) => Err(why),
            Err(_) => Err("the backup is read no further".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_fails_is_no_mistake_of_the_caller() {
        let source = std::io::Error::from(std::io::ErrorKind::StorageFull);
        let full = Error::Io {
            operation: "write",
            file: "snapshot.tmp".into(),
            source,
        };
        let said = not_restored(Path::new("data"), full);
        assert!(matches!(said, PastError::Io(..)), "{said:?}");
        let said = said.to_string();
        assert!(
            said.starts_with("data") && said.contains("restore again"),
            "{said}"
        );
        let moved = not_restored(Path::new("data"), Error::Busy);
        assert!(matches!(moved, PastError::Refused(_)), "{moved:?}");
    }
}
