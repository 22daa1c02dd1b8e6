//! The files of a directory.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

/// The files with this extension, in the order of their names.
pub fn of_kind(directory: &Path, kind: &str) -> Vec<PathBuf> {
    let paths = fs::read_dir(directory)
        .unwrap()
        .map(|it| it.unwrap().path());
    let mut found: Vec<_> = paths
        .filter(|path| path.extension().is_some_and(|it| it == kind))
        .collect();
    found.sort();
    found
}

/// All files below a directory, with their contents.
pub fn contents(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => found.extend(contents(&path)),
            false => _ = found.insert(path.clone(), fs::read(path).unwrap()),
        }
    }
    found
}
