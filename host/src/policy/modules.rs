//! Policies on disk by their digest: a request that comes again is run by the policy that handled it.
//!
//! What enters: the file of a policy before it answers anything. What leaves: the same file, checked.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::limits;

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
            let new = path.with_extension("new");
            let mut out = File::create(&new)?;
            out.write_all(file)?;
            out.sync_all()?;
            fs::rename(&new, &path)?;
        }
        // Also where it is there: an earlier run may have ended between its name and this.
        File::open(&self.directory)?.sync_all()?;
        match self.directory.parent() {
            Some(data) => File::open(data)?.sync_all(),
            None => Ok(()),
        }
    }

    /// The file of a policy.
    pub fn load(&self, digest: &blake3::Hash) -> io::Result<Vec<u8>> {
        let path = self.path(digest);
        if fs::metadata(&path)?.len() > limits::POLICY_FILE_BYTES_MAX {
            return Err(io::Error::other("it is larger than a policy may be"));
        }
        let file = fs::read(&path)?;
        if blake3::hash(&file) != *digest {
            return Err(io::Error::other(
                "it is damaged: its digest is not its name",
            ));
        }
        Ok(file)
    }

    /// Where a policy's file is.
    pub fn path(&self, digest: &blake3::Hash) -> PathBuf {
        self.directory.join(format!("{}.wasm", digest.to_hex()))
    }
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
}
