//! Policies on disk by their digest: a request that comes again is run by the policy that handled it.
//!
//! What enters: the file of a policy before it answers anything. What leaves: the same file, checked.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::POLICY_FILE_BYTES_MAX;

/// The ending of a module's name.
const FINISHED: &str = "wasm";

/// That of a file that is being written.
const UNFINISHED: &str = "new";

/// The policies of one data directory.
#[derive(Clone, Debug)]
pub struct Modules {
    directory: PathBuf,
}

impl Modules {
    /// Those below a data directory.
    pub fn of(data: &Path) -> Self {
        Self {
            directory: data.join("policies"),
        }
    }

    /// Keeps a policy's file. It is durable when this returns.
    pub fn save(&self, digest: &blake3::Hash, file: &[u8]) -> io::Result<()> {
        // A damaged one is written again.
        if self.load(digest).is_err() {
            let path = self.path(digest);
            fs::create_dir_all(&self.directory)?;
            let new = path.with_extension(UNFINISHED);
            if let Err(error) = write(&new, file).and_then(|()| fs::rename(&new, &path)) {
                // On a full disk its beginning would take what little room there is. What cannot be removed either is
                // removed by a later tidying.
                let _ = fs::remove_file(&new);
                return Err(error);
            }
        }
        // Also where it is there: an earlier run may have ended between its name and this.
        File::open(&self.directory)?.sync_all()?;
        match self.directory.parent() {
            Some(data) => File::open(data)?.sync_all(),
            None => Ok(()),
        }
    }

    /// The file of a policy.
    ///
    /// # Errors
    /// Of the kind `NotFound` or `InvalidData` where there is no such file any more; any other may pass.
    pub fn load(&self, digest: &blake3::Hash) -> io::Result<Vec<u8>> {
        let path = self.path(digest);
        if fs::metadata(&path)?.len() > POLICY_FILE_BYTES_MAX {
            let large = "it is larger than a policy may be";
            return Err(io::Error::new(io::ErrorKind::InvalidData, large));
        }
        let file = fs::read(&path)?;
        if blake3::hash(&file) != *digest {
            let damaged = "it is damaged: its digest is not its name";
            return Err(io::Error::new(io::ErrorKind::InvalidData, damaged));
        }
        Ok(file)
    }

    /// Removes what an interrupted [`Self::save`] left, and the oldest files that nobody needs, as far as they take too
    /// much together: a replay of history can use those that stay. `needed` is asked only where that is so. Not to be
    /// called while something is saved.
    pub fn tidy(
        &self,
        bytes_max: u64,
        needed: impl FnOnce() -> Vec<blake3::Hash>,
    ) -> io::Result<()> {
        let mut files = Vec::new();
        let mut bytes = 0;
        let entries = match fs::read_dir(&self.directory) {
            Ok(entries) => entries,
            // Nothing was ever kept.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        for entry in entries {
            let entry = entry?;
            let (name, about) = (entry.file_name(), entry.metadata()?);
            // What has another name is nobody's module.
            let parts = name.to_str().and_then(|name| name.split_once('.'));
            let digest = parts.and_then(|(hex, ending)| {
                let digest = blake3::Hash::from_hex(hex).ok()?;
                Some((digest, ending))
            });
            match digest {
                Some((digest, FINISHED)) => {
                    bytes += about.len();
                    files.push((about.modified()?, digest, about.len()));
                }
                Some((_, UNFINISHED)) => fs::remove_file(entry.path())?,
                _ => {}
            }
        }
        if bytes <= bytes_max {
            return Ok(());
        }
        let needed = needed();
        files.sort_by_key(|(modified, ..)| *modified);
        for (_, digest, len) in files {
            if bytes <= bytes_max {
                break;
            }
            if !needed.contains(&digest) {
                fs::remove_file(self.path(&digest))?;
                bytes -= len;
            }
        }
        Ok(())
    }

    /// Where a policy's file is.
    pub fn path(&self, digest: &blake3::Hash) -> PathBuf {
        let name = format!("{}.{FINISHED}", digest.to_hex());
        self.directory.join(name)
    }
}

fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut out = File::create(path)?;
    out.write_all(bytes)?;
    out.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_comes_back_whole_or_not_at_all() {
        let data = tempfile::tempdir().unwrap();
        let modules = Modules::of(data.path());
        let (a, b) = (blake3::hash(b"a"), blake3::hash(b"b"));
        modules.save(&a, b"a").unwrap();
        modules.save(&b, b"b").unwrap();
        assert_eq!(modules.load(&a).unwrap(), b"a");
        fs::write(modules.path(&b), b"c").unwrap();
        assert!(
            modules
                .load(&b)
                .unwrap_err()
                .to_string()
                .contains("damaged")
        );
        modules.save(&b, b"b").unwrap();
        assert_eq!(modules.load(&b).unwrap(), b"b");
        let absent = modules.load(&blake3::hash(b"c")).unwrap_err();
        assert_eq!(absent.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_module_that_cannot_be_kept_leaves_nothing_behind() {
        let data = tempfile::tempdir().unwrap();
        let modules = Modules::of(data.path());
        let digest = blake3::hash(b"a");
        // No file can take the place of a directory that is not empty.
        fs::create_dir_all(modules.path(&digest).join("in the way")).unwrap();
        modules.save(&digest, b"a").unwrap_err();
        let left = fs::read_dir(data.path().join("policies")).unwrap();
        let left: Vec<_> = left.map(|it| it.unwrap().file_name()).collect();
        assert_eq!(left, [modules.path(&digest).file_name().unwrap()]);
    }

    #[test]
    fn what_an_interrupted_save_left_goes_however_little_there_is() {
        let data = tempfile::tempdir().unwrap();
        let modules = Modules::of(data.path());
        let digest = blake3::hash(b"a");
        modules.save(&digest, b"a").unwrap();
        let half = modules.path(&blake3::hash(b"b")).with_extension("new");
        let other = data.path().join("policies/notes.new");
        for file in [&half, &other] {
            fs::write(file, b"x").unwrap();
        }
        modules.tidy(100, || panic!("all fit")).unwrap();
        assert!(!half.exists() && other.exists());
        assert!(modules.load(&digest).is_ok());
    }

    #[test]
    fn what_nobody_needs_goes_where_it_takes_too_much() {
        let data = tempfile::tempdir().unwrap();
        let modules = Modules::of(data.path());
        modules
            .tidy(0, || panic!("there is nothing to ask about"))
            .unwrap();
        let files: Vec<[u8; 100]> = (0..4).map(|n| [n; 100]).collect();
        let digests: Vec<_> = files.iter().map(|file| blake3::hash(file)).collect();
        for (file, digest) in files.iter().zip(&digests) {
            modules.save(digest, file).unwrap();
            // File systems tell times apart by some milliseconds.
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        fs::write(data.path().join("policies/readme"), [0; 1000]).unwrap();
        modules.tidy(400, || panic!("all fit")).unwrap();
        modules.tidy(200, || vec![digests[0]]).unwrap();
        let there: Vec<bool> = digests.iter().map(|it| modules.load(it).is_ok()).collect();
        assert_eq!(there, [true, false, false, true]);
        modules.tidy(0, || digests.clone()).unwrap();
        assert!(modules.load(&digests[0]).is_ok(), "what is needed stays");
        assert!(data.path().join("policies/readme").exists());
    }
}
