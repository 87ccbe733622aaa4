(* The clock of cyclic order: how many steps until block i is visited again. *)
From Coq Require Import Lia PeanoNat.

(* steps from t until block i is visited, in the order 0, 1, ..., p - 1 *)
Definition wait (p t i : nat) : nat := ((i + p - t mod p) mod p)%nat.

Lemma mod_S p t : (0 < p)%nat -> (S t mod p = if Nat.eqb (S (t mod p)) p then 0 else S (t mod p))%nat.
Proof.
  intros Hp. pose proof (Nat.div_mod t p ltac:(lia)) as E. pose proof (Nat.mod_upper_bound t p ltac:(lia)) as B.
  destruct (Nat.eqb_spec (S (t mod p)) p) as [F|F].
  - symmetry. apply (Nat.mod_unique _ _ (S (t / p))); [lia|]. nia.
  - symmetry. apply (Nat.mod_unique _ _ (t / p)); [lia|]. lia.
Qed.

Lemma small p i : (i < p)%nat -> ((i + p) mod p = i)%nat.
Proof. intros H. symmetry. apply (Nat.mod_unique _ _ 1); lia. Qed.

Lemma wait_visit p t : (0 < p)%nat -> wait p t (t mod p) = 0%nat /\ S (wait p (S t) (t mod p)) = p.
Proof.
  intros Hp. pose proof (Nat.mod_upper_bound t p ltac:(lia)) as B. unfold wait. rewrite mod_S by exact Hp.
  split; [replace (t mod p + p - t mod p)%nat with p by lia; apply Nat.mod_same; lia|].
  destruct (Nat.eqb_spec (S (t mod p)) p) as [F|F].
  - rewrite Nat.sub_0_r, small by exact B. exact F.
  - rewrite Nat.mod_small; lia.
Qed.

Lemma wait_idle p t i : (i < p)%nat -> i <> (t mod p)%nat -> wait p t i = S (wait p (S t) i).
Proof.
  intros Hi Hne. assert (Hp : (0 < p)%nat) by lia. pose proof (Nat.mod_upper_bound t p ltac:(lia)) as B.
  unfold wait. rewrite mod_S by exact Hp. set (r := (t mod p)%nat) in *.
  destruct (Nat.lt_ge_cases i r) as [H|H].
  - rewrite (Nat.mod_small (i + p - r)) by lia. destruct (Nat.eqb_spec (S r) p) as [F|F].
    + rewrite Nat.sub_0_r, small by exact Hi. lia.
    + rewrite Nat.mod_small; lia.
  - replace (i + p - r)%nat with ((i - r) + p)%nat by lia. rewrite small by lia.
    destruct (Nat.eqb_spec (S r) p) as [F|F]; [lia|].
    replace (i + p - S r)%nat with ((i - r - 1) + p)%nat by lia. rewrite small by lia. lia.
Qed.
