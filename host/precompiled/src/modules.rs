//! Saves the files of policies by digest, because a redelivered request is re-executed by the
//! policy that handled it.
//!
//! A policy must be saved before it answers a request. A file is checked against its digest when it
//! is loaded.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::POLICY_FILE_BYTES_MAX;

/// The file extension of a complete module.
const FINISHED: &str = "wasm";

/// The file extension of a module that is being written.
const UNFINISHED: &str = "new";

/// The policies of one data directory.
#[derive(Clone, Debug)]
pub struct Modules {
    directory: PathBuf,
}

impl Modules {
    /// The policies below a data directory.
    pub fn of(data: &Path) -> Self {
        Self {
            directory: data.join("policies"),
        }
    }

    /// Saves a policy's file. The file is durable when this returns.
    pub fn save(&self, digest: &blake3::Hash, file: &[u8]) -> io::Result<()> {
        // A damaged file is written again.
        if self.load(digest).is_err() {
            let path = self.path(digest);
            fs::create_dir_all(&self.directory)?;
            let new = path.with_extension(UNFINISHED);
            if let Err(error) = write(&new, file).and_then(|()| fs::rename(&new, &path)) {
                // On a full disk the incomplete file would take the remaining space. If this fails,
                // a later `tidy` removes the file.
                let _ = fs::remove_file(&new);
                return Err(error);
            }
        }
        // An existing file needs this too: an earlier run may have ended between the rename and
        // this call.
        File::open(&self.directory)?.sync_all()?;
        match self.directory.parent() {
            Some(data) => File::open(data)?.sync_all(),
            None => Ok(()),
        }
    }

    /// Loads the file of a policy. Fails with `NotFound` or `InvalidData` if there is no such
    /// intact file. Any other kind of error may be temporary.
    pub fn load(&self, digest: &blake3::Hash) -> io::Result<Vec<u8>> {
        let path = self.path(digest);
        let about = fs::metadata(&path)?;
        // The open of a pipe would wait for its writer.
        if !about.is_file() {
            return Err(io::Error::other("it is not a regular file"));
        }
        if about.len() > POLICY_FILE_BYTES_MAX {
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

    /// Removes incomplete files of an interrupted [`Self::save`]. If all files together exceed
    /// `bytes_max`, removes the oldest files that are not `needed`. A replay of history can use the
    /// remaining ones. `needed` is called only if the limit is exceeded. Must not be called during
    /// a save.
    pub fn tidy(
        &self,
        bytes_max: u64,
        needed: impl FnOnce() -> Vec<blake3::Hash>,
    ) -> io::Result<()> {
        let mut files = Vec::new();
        let mut bytes = 0;
        let entries = match fs::read_dir(&self.directory) {
            Ok(entries) => entries,
            // No policy was ever saved.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        for entry in entries {
            let entry = entry?;
            let (name, about) = (entry.file_name(), entry.metadata()?);
            // A file with any other name is not a module.
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

    /// The directory of the files. The first save creates it.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The path of a policy's file.
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
    fn damaged_module_is_refused_until_it_is_saved_again() {
        let data = tempfile::tempdir().unwrap();
        let modules = Modules::of(data.path());
        let (a, b) = (blake3::hash(b"a"), blake3::hash(b"b"));
        modules.save(&a, b"a").unwrap();
        modules.save(&b, b"b").unwrap();
        assert_eq!(modules.load(&a).unwrap(), b"a");
        fs::write(modules.path(&b), b"c").unwrap();
        let error = modules.load(&b).unwrap_err().to_string();
        assert!(error.contains("damaged"), "{error}");
        modules.save(&b, b"b").unwrap();
        assert_eq!(modules.load(&b).unwrap(), b"b");
        let absent = modules.load(&blake3::hash(b"c")).unwrap_err();
        assert_eq!(absent.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn failed_save_leaves_no_incomplete_file() {
        let data = tempfile::tempdir().unwrap();
        let modules = Modules::of(data.path());
        let digest = blake3::hash(b"a");
        // A file cannot replace a directory that is not empty.
        fs::create_dir_all(modules.path(&digest).join("in the way")).unwrap();
        modules.save(&digest, b"a").unwrap_err();
        let left = fs::read_dir(data.path().join("policies")).unwrap();
        let left: Vec<_> = left.map(|it| it.unwrap().file_name()).collect();
        assert_eq!(left, [modules.path(&digest).file_name().unwrap()]);
    }

    #[test]
    fn incomplete_files_are_removed_even_below_the_limit() {
        let data = tempfile::tempdir().unwrap();
        let modules = Modules::of(data.path());
        let digest = blake3::hash(b"a");
        modules.save(&digest, b"a").unwrap();
        let half = modules.path(&blake3::hash(b"b")).with_extension("new");
        let other = data.path().join("policies/notes.new");
        for file in [&half, &other] {
            fs::write(file, b"x").unwrap();
        }
        modules.tidy(100, || panic!("all files fit")).unwrap();
        assert!(!half.exists() && other.exists());
        assert!(modules.load(&digest).is_ok());
    }

    #[test]
    fn oldest_unneeded_modules_are_removed_above_the_limit() {
        let data = tempfile::tempdir().unwrap();
        let modules = Modules::of(data.path());
        modules.tidy(0, || panic!("there are no files")).unwrap();
        let files: Vec<[u8; 100]> = (0..4).map(|n| [n; 100]).collect();
        let digests: Vec<_> = files.iter().map(|file| blake3::hash(file)).collect();
        for (file, digest) in files.iter().zip(&digests) {
            modules.save(digest, file).unwrap();
            // The times of file systems have a resolution of some milliseconds.
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        fs::write(data.path().join("policies/readme"), [0; 1000]).unwrap();
        modules.tidy(400, || panic!("all files fit")).unwrap();
        modules.tidy(200, || vec![digests[0]]).unwrap();
        let there: Vec<bool> = digests.iter().map(|it| modules.load(it).is_ok()).collect();
        assert_eq!(there, [true, false, false, true]);
        modules.tidy(0, || digests.clone()).unwrap();
        assert!(modules.load(&digests[0]).is_ok(), "needed modules stay");
        assert!(data.path().join("policies/readme").exists());
    }
}
