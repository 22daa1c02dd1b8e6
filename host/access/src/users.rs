//! Reads the users file, which has a line `NAME:HASH` for each user, and verifies passwords. An
//! operator's line is `NAME:HASH:ROLE`.
//!
//! A password must never be stored. After the first right password of a user, a keyed hash of it is
//! remembered, so that a reconnection costs microseconds instead of tens of milliseconds. Reading
//! the file again makes a new key and drops all remembered hashes.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, OnceLock};

use argon2::password_hash::{Output, PasswordHashString, Salt, SaltString};
use argon2::{Algorithm, Argon2, Block, Params, PasswordHash, PasswordHasher, Version};

use crate::limits;
use crate::roles::{Role, RoleError};
use statehouse_files::watch::{FileError, read_file};

/// Why a users file or a new user is refused. The text is a sentence for the operator.
#[derive(Debug, thiserror::Error)]
pub enum UsersError {
    /// The file cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// Other accounts could add a user to the file.
    #[error(
        "{0} can be written by other accounts (mode {1:03o}), which could add users: run `chmod 600 {0}`"
    )]
    Writable(PathBuf, u32),
    /// A line is invalid.
    #[error("line {line} of {path}: {error}")]
    Line {
        /// The users file.
        path: PathBuf,
        /// The line number, from 1.
        line: usize,
        /// The error of the line.
        error: LineError,
    },
    /// The system has no randomness.
    #[error("the system has no randomness for salts and keys: {0}")]
    Random(getrandom::Error),
}

/// Why a line is invalid.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum LineError {
    /// The line is not UTF-8 text, or has no colon.
    #[error(
        "it is not NAME:HASH or NAME:HASH:ROLE; `statehouse user add NAME --users FILE` writes such lines"
    )]
    Form,
    /// The name is invalid.
    #[error(transparent)]
    Name(#[from] NameError),
    /// An earlier line has the same name.
    #[error("this user is also in an earlier line: remove one of them")]
    Duplicate,
    /// The hash is not one of Argon2id.
    #[error(
        "the text after the name is not an Argon2id hash ($argon2id$v=19$m=…,t=…,p=…$SALT$HASH); `statehouse user add` makes one"
    )]
    Hash,
    /// The role is unknown.
    #[error(transparent)]
    Role(#[from] RoleError),
    /// Checking the hash costs more than a gateway can afford.
    #[error(
        "its hash takes more than {} KiB of memory, {} passes or {} lanes: make a cheaper one with `statehouse user add`",
        limits::PASSWORD_MEMORY_KIB_MAX,
        limits::PASSWORD_PASSES_MAX,
        limits::PASSWORD_LANES_MAX
    )]
    TooExpensive,
    /// The file has too many users.
    #[error("a users file holds {} users at most", limits::USERS_MAX)]
    TooMany,
}

/// The rules for a user name.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a user name has 1 to {} bytes, no colon, no control characters, no space at either end, and does not begin with #",
    limits::USER_NAME_BYTES_MAX
)]
pub struct NameError;

/// The users of a file.
pub struct Users {
    users: HashMap<Box<str>, User>,
    /// How many users have a hash of each cost.
    costs: BTreeMap<Cost, usize>,
    /// The key of the quick hashes.
    key: [u8; blake3::KEY_LEN],
}

/// What a check of a password costs: memory in KiB, passes and lanes.
type Cost = (u32, u32, u32);

/// The cost of the hashes that [`hash`] makes.
const OWN_COST: Cost = (
    limits::PASSWORD_MEMORY_KIB,
    limits::PASSWORD_PASSES,
    limits::PASSWORD_LANES,
);

struct User {
    hash: PasswordHashString,
    credential: u64,
    /// What the user may do through the admin API.
    role: Option<Role>,
    /// The quick hash of the right password, after a client has sent it.
    remembered: OnceLock<blake3::Hash>,
}

impl Users {
    /// Reads a file that only its owner can write. Fails if one line is bad, since its user could
    /// no longer log in.
    pub fn open(path: &Path) -> Result<Self, UsersError> {
        let failed = |error| FileError::Read(path.to_owned(), error);
        let mode = fs::metadata(path).map_err(failed)?.permissions().mode() & 0o777;
        if mode & 0o022 != 0 {
            return Err(UsersError::Writable(path.to_owned(), mode));
        }
        let bytes = read_file(path, limits::USERS_FILE_BYTES_MAX)?;
        // Some editors begin a file with a byte order mark, which is no part of the first name.
        let text = bytes.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(&bytes);
        let mut key = [0; blake3::KEY_LEN];
        getrandom::fill(&mut key).map_err(UsersError::Random)?;
        let mut users = HashMap::new();
        for (number, line) in text.split(|byte| *byte == b'\n').enumerate() {
            read_line(line, &mut users).map_err(|error| UsersError::Line {
                path: path.to_owned(),
                line: number + 1,
                error,
            })?;
        }
        // A refused file is read every second, so nothing is logged before.
        if mode & 0o004 != 0 {
            let path = path.display();
            tracing::warn!(
                "{path} can be read by other accounts (mode {mode:03o}), which could guess passwords from its hashes: run `chmod 600 {path}`"
            );
        }
        let mut costs = BTreeMap::new();
        for user in users.values() {
            // The hash was checked.
            if let Ok(params) = Params::try_from(&user.hash.password_hash()) {
                let cost = (params.m_cost(), params.t_cost(), params.p_cost());
                *costs.entry(cost).or_default() += 1;
            }
        }
        Ok(Self { users, costs, key })
    }

    /// The number of users.
    #[must_use]
    pub fn len(&self) -> usize {
        self.users.len()
    }

    /// Whether there are no users.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.users.is_empty()
    }

    /// A number that changes with the password of the user. `None` if there is no such user.
    #[must_use]
    pub fn credential(&self, name: &str) -> Option<u64> {
        self.users.get(name).map(|user| user.credential)
    }

    /// What the user may do through the admin API, if anything.
    #[must_use]
    pub fn role(&self, name: &str) -> Option<Role> {
        self.users.get(name)?.role
    }

    /// Whether the password of this user is remembered from an earlier login.
    #[must_use]
    pub fn knows(&self, name: &str) -> bool {
        let user = self.users.get(name);
        user.is_some_and(|user| user.remembered.get().is_some())
    }

    /// Whether this is the remembered password of the user. Takes microseconds.
    #[must_use]
    pub fn remembers(&self, name: &str, password: &[u8]) -> bool {
        let user = self.users.get(name);
        let remembered = user.and_then(|user| user.remembered.get());
        // The comparison of two hashes takes constant time.
        remembered.is_some_and(|remembered| *remembered == self.quick_hash(name, password))
    }

    /// Whether this password is right. Takes some megabytes and tens of milliseconds of processor
    /// time, also for a user that does not exist, so that the time does not reveal who exists.
    #[must_use]
    pub fn verify(&self, name: &str, password: &[u8]) -> bool {
        let Some(user) = self.users.get(name) else {
            if let Ok(params) = params(self.cost_of_unknown(name)) {
                _ = compute(params, password, b"0123456789abcdef", &mut [0; 32]);
            }
            return false;
        };
        let is_right = is_hash_of(&user.hash.password_hash(), password);
        if is_right {
            _ = user.remembered.set(self.quick_hash(name, password));
        }
        is_right
    }

    /// The cost of a check for a name that no user has. Each cost is as frequent among these names
    /// as among users, and a name keeps its cost when users are added or removed.
    fn cost_of_unknown(&self, name: &str) -> Cost {
        /// Secret, since the cost of a name would otherwise reveal whether it is that of a user.
        static KEY: LazyLock<[u8; blake3::KEY_LEN]> = LazyLock::new(|| {
            let mut key = [0; blake3::KEY_LEN];
            // Reading the users needs randomness too, so this cannot fail.
            _ = getrandom::fill(&mut key);
            key
        });
        let mut share = [0; 4];
        share.copy_from_slice(&blake3::keyed_hash(&KEY, name.as_bytes()).as_bytes()[..4]);
        // There are at most `USERS_MAX` users, so this cannot overflow.
        let mut index = (u64::from(u32::from_le_bytes(share)) * self.users.len() as u64) >> 32;
        for (cost, count) in &self.costs {
            match index.checked_sub(*count as u64) {
                Some(rest) => index = rest,
                None => return *cost,
            }
        }
        OWN_COST
    }

    fn quick_hash(&self, name: &str, password: &[u8]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        // The colon separates the two, since names contain none.
        hasher.update(name.as_bytes()).update(b":").update(password);
        hasher.finalize()
    }
}

fn read_line(line: &[u8], users: &mut HashMap<Box<str>, User>) -> Result<(), LineError> {
    let line = std::str::from_utf8(line).map_err(|_| LineError::Form)?;
    let line = line.strip_suffix('\r').unwrap_or(line);
    if line.trim().is_empty() || line.starts_with('#') {
        return Ok(());
    }
    let (name, hash) = line.split_once(':').ok_or(LineError::Form)?;
    check_name(name)?;
    // A hash has no colon.
    let (hash, role) = match hash.split_once(':') {
        Some((hash, role)) => (hash, Some(role.trim().parse()?)),
        None => (hash, None),
    };
    let hash = PasswordHashString::new(hash.trim()).map_err(|_| LineError::Hash)?;
    check_hash(&hash.password_hash())?;
    if users.len() >= limits::USERS_MAX {
        return Err(LineError::TooMany);
    }
    let mut number = [0; 8];
    number.copy_from_slice(&blake3::hash(hash.as_bytes()).as_bytes()[..8]);
    let user = User {
        credential: u64::from_le_bytes(number),
        hash,
        role,
        remembered: OnceLock::new(),
    };
    match users.insert(name.into(), user) {
        None => Ok(()),
        Some(_) => Err(LineError::Duplicate),
    }
}

fn check_hash(hash: &PasswordHash<'_>) -> Result<(), LineError> {
    let is_argon2id = hash.algorithm == Algorithm::Argon2id.ident()
        && hash.version == Some(Version::V0x13.into())
        && hash.salt.is_some()
        && hash.hash.is_some();
    if !is_argon2id {
        return Err(LineError::Hash);
    }
    let params = Params::try_from(hash).map_err(|_| LineError::Hash)?;
    let is_affordable = params.m_cost() <= limits::PASSWORD_MEMORY_KIB_MAX
        && params.t_cost() <= limits::PASSWORD_PASSES_MAX
        && params.p_cost() <= limits::PASSWORD_LANES_MAX;
    if is_affordable {
        Ok(())
    } else {
        Err(LineError::TooExpensive)
    }
}

/// Whether this is the hash of the password.
fn is_hash_of(hash: &PasswordHash<'_>, password: &[u8]) -> bool {
    let (Ok(params), Some(salt), Some(expected)) = (Params::try_from(hash), hash.salt, hash.hash)
    else {
        return false;
    };
    let mut salt_bytes = [0; Salt::MAX_LENGTH];
    let Ok(salt) = salt.decode_b64(&mut salt_bytes) else {
        return false;
    };
    let mut out = vec![0; expected.len()];
    let hashed = compute(params, password, salt, &mut out);
    // The comparison of two outputs takes constant time.
    hashed.is_ok() && Output::new(&out).is_ok_and(|out| out == expected)
}

fn compute(params: Params, password: &[u8], salt: &[u8], out: &mut [u8]) -> argon2::Result<()> {
    // The allocator caches freed memory for each thread, but returns large allocations to the
    // system at once. Unused blocks are never resident.
    let mut memory = Vec::with_capacity(params.block_count().max(limits::PASSWORD_BLOCKS_MIN));
    memory.resize(params.block_count(), Block::new());
    #[cfg(test)]
    tests::COMPUTED.set(Some((params.m_cost(), params.t_cost(), params.p_cost())));
    let argon2 = Argon2::new(Algorithm::Argon2id, Version::V0x13, params);
    argon2.hash_password_into_with_memory(password, salt, out, &mut memory)
}

fn params((memory, passes, lanes): Cost) -> argon2::Result<Params> {
    Params::new(memory, passes, lanes, None)
}

/// Checks the name of a user. The text of the error lists the rules for names.
pub fn check_name(name: &str) -> Result<(), NameError> {
    let is_good = (1..=limits::USER_NAME_BYTES_MAX).contains(&name.len())
        && name.trim() == name
        && !name.starts_with('#')
        && !name.contains(|it: char| it == ':' || it.is_control());
    if is_good { Ok(()) } else { Err(NameError) }
}

/// Hashes a password with a new salt. Fails if the system has no randomness.
pub fn hash(password: &[u8]) -> Result<String, UsersError> {
    let mut salt = [0; Salt::RECOMMENDED_LENGTH];
    getrandom::fill(&mut salt).map_err(UsersError::Random)?;
    let hash = hash_with(password, &salt, OWN_COST);
    // Salt, memory and the length of the password are within the limits of Argon2.
    Ok(hash.expect("Argon2 takes these parameters").to_string())
}

fn hash_with(
    password: &[u8],
    salt: &[u8],
    cost: Cost,
) -> Result<PasswordHashString, argon2::password_hash::Error> {
    let params = params(cost)?;
    let salt = SaltString::encode_b64(salt)?;
    let argon2 = Argon2::new(Algorithm::Argon2id, Version::V0x13, params);
    let hash = argon2.hash_password(password, &salt)?;
    Ok(hash.serialize())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local! {
        /// The cost of the last hash of this thread.
        pub(super) static COMPUTED: Cell<Option<Cost>> = const { Cell::new(None) };
    }

    fn open(text: &str, mode: u32) -> Result<Users, String> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("users");
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        Users::open(&path).map_err(|error| error.to_string())
    }

    #[test]
    fn only_the_own_password_of_a_user_is_right() {
        let (anna, bert) = (hash(b"right").unwrap(), hash(b"right").unwrap());
        assert_ne!(anna, bert, "salts");
        let text = format!("# people\n\nanna:{anna}\r\nbert b.:{bert}\n");
        let users = open(&text, 0o600).unwrap();
        assert_eq!(users.len(), 2);
        assert_ne!(users.credential("anna"), users.credential("bert b."));
        assert!(!users.remembers("anna", b"right"), "before the first login");
        for (name, password) in [
            ("anna", &b"wrong"[..]),
            ("anna", b""),
            ("Anna", b"right"),
            ("", b""),
            ("carl", b"right"),
        ] {
            assert!(!users.verify(name, password), "{name}");
            assert!(!users.remembers(name, password), "{name}");
        }
        assert!(users.verify("anna", b"right"));
        assert!(users.remembers("anna", b"right"));
        assert!(!users.remembers("anna", b"wrong"));
        assert!(!users.remembers("bert b.", b"right"), "another user");
        // Reading the file again drops remembered passwords. A credential changes only with its
        // hash.
        let again = open(&text, 0o600).unwrap();
        assert!(!again.remembers("anna", b"right"));
        assert_eq!(again.credential("anna"), users.credential("anna"));
        let changed = format!("anna:{}\n", hash(b"right").unwrap());
        let changed = open(&changed, 0o600).unwrap();
        assert_ne!(changed.credential("anna"), users.credential("anna"));
        assert_eq!(changed.credential("bert b."), None);
    }

    #[test]
    fn unknown_user_costs_as_much_as_a_known_one() {
        let users = open(&format!("anna:{}\n", hash(b"right").unwrap()), 0o600).unwrap();
        let work_for = |name| {
            assert!(!users.verify(name, b"wrong"));
            COMPUTED.take()
        };
        let known = work_for("anna");
        assert!(known.is_some());
        assert_eq!(work_for("nobody"), known);
    }

    /// Regression: only users with hashes of other tools took another time than unknown names.
    #[test]
    fn unknown_names_take_the_times_of_all_users() {
        let hash = |cost| hash_with(b"right", b"0123456789abcdef", cost).unwrap();
        let (cheap, dear) = ((8, 1, 1), (16, 2, 2));
        let line = |name, cost| format!("{name}:{}\n", hash(cost));
        let two = line("anna", cheap) + &line("bert", cheap) + &line("carl", dear);
        let users = open(&two, 0o600).unwrap();
        let names: Vec<String> = (0..300).map(|it| format!("unknown {it}")).collect();
        let costs: Vec<Cost> = names.iter().map(|it| users.cost_of_unknown(it)).collect();
        let dear_ones = costs.iter().filter(|it| **it == dear).count();
        assert!((50..150).contains(&dear_ones), "{dear_ones} of 300");
        assert!(costs.iter().all(|it| [cheap, dear].contains(it)));
        for (name, cost) in names.iter().zip(&costs).take(20) {
            assert!(!users.verify(name, b"wrong"));
            assert_eq!(COMPUTED.take(), Some(*cost));
        }
        let again = open(&(two + &line("dora", cheap)), 0o600).unwrap();
        let changed =
            (names.iter().zip(&costs)).filter(|(it, cost)| again.cost_of_unknown(it) != **cost);
        assert!(changed.count() < 60, "a name keeps its cost");
        let none = open("", 0o600).unwrap();
        assert_eq!(none.cost_of_unknown("anna"), OWN_COST);
    }

    #[test]
    fn byte_order_mark_is_no_part_of_the_first_name() {
        let hash = hash(b"right").unwrap();
        for text in [
            format!("\u{feff}anna:{hash}\nbert:{hash}\n"),
            format!("\u{feff}# people\r\nanna:{hash}\r\nbert:{hash}\r\n"),
        ] {
            let users = open(&text, 0o600).unwrap();
            assert_eq!(users.len(), 2);
            assert!(users.credential("anna").is_some() && users.credential("bert").is_some());
        }
        assert!(open("\u{feff}", 0o600).unwrap().is_empty());
        let twice = open(&format!("\u{feff}anna:{hash}\nanna:{hash}\n"), 0o600);
        assert!(twice.err().unwrap().starts_with("line 2 of /"));
    }

    #[test]
    fn third_field_of_a_line_is_the_role() {
        let hash = hash(b"right").unwrap();
        let text = format!("anna:{hash}:operate\nbert:{hash}\ncarl:{hash}: read \r\n");
        let users = open(&text, 0o600).unwrap();
        assert_eq!(users.role("anna"), Some(Role::Operate));
        assert_eq!(users.role("bert"), None);
        assert_eq!(users.role("carl"), Some(Role::Read));
        assert_eq!(users.role("dora"), None);
        assert!(users.verify("anna", b"right"));
        // A role is no credential: changing it must not end the user's connections.
        assert_eq!(users.credential("anna"), users.credential("bert"));
    }

    #[test]
    fn bad_line_is_refused_with_its_number() {
        let good = hash(b"x").unwrap();
        let line = |text: &str| open(&format!("# first\n{text}\n"), 0o600).err().unwrap();
        let changed = |from: &str, to: &str| format!("anna:{}", good.replace(from, to));
        for (text, says) in [
            ("anna".to_owned(), "it is not NAME:HASH"),
            (format!("anna:{good}:root"), "`root` is no role"),
            (format!("anna:{good}:"), "`` is no role"),
            (format!("anna:{good}:read:ship"), "is no role"),
            (format!(":{good}"), "a user name has 1 to"),
            (format!(" anna:{good}"), "a user name has 1 to"),
            (format!("a\tb:{good}"), "a user name has 1 to"),
            ("anna:secret".to_owned(), "not an Argon2id hash"),
            ("anna:".to_owned(), "not an Argon2id hash"),
            (changed("argon2id", "argon2i"), "not an Argon2id hash"),
            (changed("v=19", "v=16"), "not an Argon2id hash"),
            (changed("m=19456", "m=4194304"), "takes more than"),
            (changed("t=2", "t=1000000"), "takes more than"),
            (changed("p=1", "p=64"), "takes more than"),
            // Without the hash itself, any password would match.
            (
                format!("anna:{}", &good[..good.rfind('$').unwrap()]),
                "not an Argon2id hash",
            ),
        ] {
            let error = line(&text);
            assert!(
                error.starts_with("line 2 of /") && error.contains(says),
                "{text}: {error}"
            );
        }
        let twice = line(&format!("anna:{good}\nanna:{good}"));
        assert!(twice.starts_with("line 3 of /") && twice.contains("in an earlier line"));
        assert!(line("\u{FFFD}").contains("NAME:HASH"));
    }

    #[test]
    fn users_file_that_others_can_write_is_refused() {
        for mode in [0o600, 0o640, 0o400, 0o644] {
            assert!(open("", mode).unwrap().is_empty());
        }
        for mode in [0o620, 0o602, 0o666] {
            let error = open("", mode).err().unwrap();
            assert!(error.contains("chmod 600"), "{mode:o}: {error}");
        }
    }
}
