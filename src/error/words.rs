//! What the server says of a race that was lost: three SQLSTATEs, of which the driver tells one.
//!
//! diesel-async has a kind for 40001. 40P01 and 55P03 come as text in the language of the server
//! (`lc_messages`), so that they are known by what is the same in every language, or by the words of each.

use diesel::result::{DatabaseErrorInformation, DatabaseErrorKind, Error as QueryError};

/// 55P03, `lock_timeout`, in every language that the server speaks.
const LOCK_TIMEOUT: [&str; 12] = [
    "canceling statement due to lock timeout",
    "storniere Anfrage wegen Zeitüberschreitung einer Sperre",
    "cancelando la sentencia debido a que se agotó el tiempo de espera de candados (locks)",
    "annulation de la requête à cause du délai écoulé pour l'obtention des verrous",
    "annullamento dell'istruzione a causa di timeout di lock",
    "ロックのタイムアウトのためステートメントをキャンセルしています",
    "გამოსახულება გაუქმდება ბლოკის მოლოდინის ვადის ამოწურვის გამო",
    "잠금 대기 시간 초과로 작업을 취소합니다.",
    "выполнение оператора отменено из-за тайм-аута блокировки",
    "avbryter sats på grund av lås-timeout",
    "виконання оператора скасовано через тайм-аут блокування",
    "由于锁超时，取消语句操作",
];

/// 40001 or 40P01: another transaction was first, and a new one helps.
pub(crate) fn is_lost_race(error: &QueryError) -> bool {
    matches!(error, QueryError::DatabaseError(DatabaseErrorKind::SerializationFailure, _)) || is_deadlock(error)
}

/// Transactions waited for each other in a circle, and this one was chosen to end.
fn is_deadlock(error: &QueryError) -> bool {
    let Some(info) = without_kind(error) else { return false };
    // Who waits for what, a line for each. The names of lock modes are the same in every language.
    let waits = |line: &str| line.contains("ShareLock") || line.contains("ExclusiveLock");
    let is_circle = |detail: &str| detail.lines().count() > 1 && detail.lines().all(waits);
    // Over several nodes nobody sees the whole circle, and Citus says so in English.
    info.details().is_some_and(is_circle) || info.message().ends_with("involved in a distributed deadlock")
}

/// 55P03: somebody held a lock for longer than `lock_timeout`.
pub(crate) fn is_lock_timeout(error: &QueryError) -> bool {
    without_kind(error).is_some_and(|info| LOCK_TIMEOUT.contains(&info.message()))
}

/// Whether the statement cannot mean anything here: what it names is not there, or is something else. Only the
/// analysis of a statement tells the place in it.
pub(super) fn is_misfit(error: &QueryError) -> bool {
    without_kind(error).is_some_and(|info| info.statement_position().is_some())
}

fn without_kind(error: &QueryError) -> Option<&(dyn DatabaseErrorInformation + Send + Sync)> {
    match error {
        QueryError::DatabaseError(DatabaseErrorKind::Unknown, info) => Some(&**info),
        _ => None,
    }
}
