(* T6: one gradient pulse g moves x by -eta (1 - beta) beta^k g at the k-th step after it, -eta g in total: EMA
   momentum delays the block's step, it neither adds to it nor takes from it. *)
From Coq Require Import Reals Lra Psatz Lia.
From Coquelicot Require Import Coquelicot.
Open Scope R_scope.

Definition pulse (x m : nat -> R) (eta beta g : R) : Prop :=
  m 0%nat = 0 /\ m 1%nat = beta * m 0%nat + (1 - beta) * g /\
  (forall t, m (S (S t)) = beta * m (S t)) /\ (forall t, x (S t) = x t - eta * m (S t)).

Theorem pulse_response : forall x m eta beta g, pulse x m eta beta g ->
  forall k, x (S k) = x k - eta * (1 - beta) * beta ^ k * g /\ x k = x 0%nat - eta * g * (1 - beta ^ k).
Proof.
  intros x m eta beta g [H0 [H1 [Hm Hx]]].
  assert (M : forall k, m (S k) = (1 - beta) * beta ^ k * g).
  { induction k as [|k IH]; [rewrite H1, H0; simpl; ring|]. rewrite Hm, IH. simpl. ring. }
  induction k as [|k [_ IH]].
  - split; [rewrite Hx, M|]; simpl; ring.
  - split; [rewrite Hx, M; ring|]. rewrite Hx, M, IH. simpl. ring.
Qed.

Theorem pulse_total : forall x m eta beta g, 0 <= beta < 1 -> pulse x m eta beta g ->
  is_lim_seq x (x 0%nat - eta * g).
Proof.
  intros x m eta beta g Hb H.
  apply is_lim_seq_ext with (fun k => (x 0%nat - eta * g) + eta * g * beta ^ k).
  - intros k. destruct (pulse_response x m eta beta g H k) as [_ ->]. ring.
  - replace (x 0%nat - eta * g) with ((x 0%nat - eta * g) + eta * g * 0) at 1 by ring.
    apply is_lim_seq_plus'; [apply is_lim_seq_const|].
    apply (is_lim_seq_scal_l (fun k => beta ^ k) (eta * g) 0). apply is_lim_seq_geom. rewrite Rabs_pos_eq; lra.
Qed.
